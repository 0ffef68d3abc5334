"""Fourier transforms and complex arithmetic, compared with torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fft, nn

from tpu2edge.errors import ExportError, LoweringError

real, made = torch.view_as_real, torch.view_as_complex


def test_transforms_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    signal, odd, plane = torch.randn(3, 16), torch.randn(2, 15), torch.randn(2, 5, 12)
    check(
        {
            "fft": (lambda x: real(fft.fft(x, norm="ortho")), signal),
            "fftn": (lambda x: fft.fftn(x, dim=(1, 2)).real, plane),
            "ifftn": (lambda x: fft.ifftn(fft.fftn(x)).real, plane),
            "rfft_odd": (lambda x: real(fft.rfft(x)), odd),
            "rfft_longer": (lambda x: real(fft.rfft(x, n=20, norm="forward")), signal),
            "rfft_shorter": (lambda x: fft.rfft(x, n=10, dim=1).abs(), signal),
            "irfft": (lambda x: fft.irfft(fft.rfft(x) * 2, n=13), signal),
            "irfft_odd": (lambda x: fft.irfft(fft.rfft(x, norm="ortho"), 15, norm="ortho"), odd),
            "irfft2": (lambda x: fft.irfft2(fft.rfft2(x)), plane),
            "hfft": (lambda x: fft.hfft(fft.ihfft(x)), signal),
            "shift": (lambda x: fft.fftshift(fft.fft(x)).abs(), signal),
            "frequencies": (lambda x: x * fft.fftfreq(16), signal),
        },
        most=1e-5,
    )


def test_short_time_transforms_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    signal, window = torch.randn(2, 64), torch.hann_window(16)

    def back(x: torch.Tensor) -> torch.Tensor:
        z = torch.stft(x, 16, 4, window=window, return_complex=True)
        return torch.istft(z, 16, 4, window=window, length=64)

    check(
        {
            "stft": (
                lambda x: real(torch.stft(x, 16, 4, window=window, return_complex=True)),
                signal,
            ),
            "whole": (
                lambda x: torch.stft(
                    x, 16, 5, 12, window[:12], center=False, onesided=False, return_complex=True
                ).abs(),
                signal,
            ),
            "istft": (back, signal),
        },
        most=1e-5,
    )


class Mixer(nn.Module):
    """A Fourier neural operator's layer: complex weights, a write into part of the spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4, 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = fft.rfft2(x)
        out = torch.zeros(x.shape[0], 5, x.shape[2], x.shape[3] // 2 + 1, dtype=torch.cfloat)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", z[:, :, :4, :4], self.weight)
        return fft.irfft2(out, s=x.shape[-2:])


def test_complex_arithmetic_is_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    check(
        {
            "mul": (lambda a, b: real(made(a) * made(b)), (x, y)),
            "div": (lambda a, b: real(made(a) / made(b)), (x, y)),
            "parts": (lambda a: made(a).real + made(a).imag + made(a).angle(), x),
            "mixed": (lambda a: real((1j * made(a) + 2 - made(a).conj()).sum(0)), x),
            "exp": (lambda a: real(made(a).exp()), x),
            "matmul": (
                lambda a, b: real(made(a) @ made(b)),
                (torch.randn(3, 4, 2), torch.randn(4, 5, 2)),
            ),
            "rotary": (
                lambda a, f: real(made(a) * torch.polar(torch.ones_like(f), f)).flatten(1),
                (torch.randn(6, 4, 2), torch.randn(6, 4)),
            ),
            "operator": (Mixer(), torch.randn(2, 3, 8, 10)),
        },
        most=1e-5,
    )


def test_a_complex_operator_without_a_real_form_is_named(
    convert_one: Callable[..., None],
) -> None:
    def inverse(x: torch.Tensor) -> Any:
        return torch.linalg.inv(made(x)).abs()

    with pytest.raises(LoweringError, match="linalg_inv.*on complex numbers") as caught:
        convert_one(inverse, torch.randn(3, 3, 2))
    assert caught.value.place is not None
    assert caught.value.place.op == "aten.linalg_inv.default"
    assert caught.value.place.line is not None


def test_a_complex_output_is_refused(convert_one: Callable[..., None]) -> None:
    with pytest.raises(ExportError, match="complex64.*view_as_real|complex64"):
        convert_one(lambda x: made(x), torch.randn(3, 2))
