// Shows a process fewer x86 features than the CPU has, at native speed: LD_PRELOAD this library.
//
//     TPU2EDGE_ISA = sse41 | avx | avx2 | avx512
//
// Linux lets a process fault on the CPUID instruction (arch_prctl(ARCH_SET_CPUID), CPUs with the
// flag cpuid_fault). The handler runs the instruction, clears the bits of what the level lacks, and
// goes on behind it. LiteRT, XNNPACK and NumPy choose their kernels by CPUID; the C library has done
// so before this library is loaded and keeps its own choice, which computes no numbers.
//
// Bits: Intel's manual, volume 2A, CPUID. Each level holds the ones before it:
// sse41 = Nehalem (SSE4.2 too, which NumPy needs), avx = Sandy Bridge, avx2 = Haswell (FMA, F16C),
// avx512 = Skylake-X (no VNNI, no BF16, no FP16).

#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 "unknown"
#endif
// Seen from outside, so that it stays in the library.
extern const char tpu2edge_cpuid_level_source[];
const char tpu2edge_cpuid_level_source[] = SOURCE_SHA256;

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

enum { SSE41, AVX, AVX2, AVX512, LEVELS };
static const char *const NAMES[LEVELS] = {"sse41", "avx", "avx2", "avx512"};
static int level;

static void mask(unsigned leaf, unsigned sub, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
  if (leaf == 1) {
    if (level < AVX) *c &= ~(BIT(28) | BIT(26) | BIT(27));  // AVX, XSAVE, OSXSAVE
    if (level < AVX2) *c &= ~(BIT(12) | BIT(29));           // FMA, F16C
  }
  if (leaf == 7 && sub == 0) {
    if (level < AVX2) *b &= ~(BIT(5) | BIT(3) | BIT(8));  // AVX2, BMI1, BMI2
    if (level < AVX512) {
      *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
      *c &= ~(BIT(1) | BIT(6) | BIT(14));  // VBMI, VBMI2, VPOPCNTDQ
    }
    *b &= ~BIT(21);                                           // IFMA
    *c &= ~(BIT(1) | BIT(6) | BIT(8) | BIT(11) | BIT(12));    // VBMI, VBMI2, GFNI, VNNI, BITALG
    *d &= ~(BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));  // VP2INTERSECT, AMX, AVX512-FP16
  }
  if (leaf == 7 && sub == 1) {
    *a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));  // AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA
    *d = 0;                                        // AVX-VNNI-INT8 and later ones
  }
}

static void on_fault(int number, siginfo_t *info, void *context) {
  (void)info;
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *at = (const unsigned char *)registers[REG_RIP];
  if (at[0] != 0x0f || at[1] != 0xa2) {  // no CPUID: a true fault, which then ends the process
    signal(number, SIG_DFL);
    return;
  }
  unsigned leaf = (unsigned)registers[REG_RAX], sub = (unsigned)registers[REG_RCX];
  unsigned a = leaf, b = 0, c = sub, d = 0;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  mask(leaf, sub, &a, &b, &c, &d);
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  const char *wanted = getenv("TPU2EDGE_ISA");
  if (!wanted) return;
  for (level = 0; level < LEVELS && strcmp(wanted, NAMES[level]); level++) {}
  if (level == LEVELS) {
    fprintf(stderr, "TPU2EDGE_ISA: unknown level '%s'\n", wanted);
    _exit(97);
  }
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
    fprintf(stderr, "TPU2EDGE_ISA: this machine cannot fault on CPUID\n");
    _exit(98);
  }
}
