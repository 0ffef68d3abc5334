"""Where reference outputs come from: captured on a device, predicted, or computed on the CPU."""
