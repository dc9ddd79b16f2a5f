/* What a program sees of a real card through the driver API: memory to the edge, launches, a share of the SMs.
 *
 *   probe info                 total and free memory of card 0 in bytes
 *   probe fill MIB             allocates pieces of MIB until the driver says out of memory; prints what it held
 *   probe launch N             ns per launch of an empty kernel, over N launches
 *   probe work SECONDS MS      runs kernels of about MS milliseconds on all SMs, each awaited; prints ms of card time
 *
 * The driver is found as frameworks do it: dlopen, dlsym. Every failed call ends the program with the call's name
 * and the driver's code. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *handle;

/* Spins for a number of cycles of its SM. */
static const char kernel[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u64 cycles)\n{\n"
    "  .reg .pred %p;\n  .reg .u64 %r<5>;\n"
    "  ld.param.u64 %r1, [cycles];\n"
    "  setp.eq.u64 %p, %r1, 0;\n  @%p bra done;\n"
    "  mov.u64 %r2, %clock64;\n"
    "again:\n  mov.u64 %r3, %clock64;\n  sub.u64 %r4, %r3, %r2;\n"
    "  setp.lt.u64 %p, %r4, %r1;\n  @%p bra again;\n"
    "done:\n  ret;\n}\n";

static void *driver;

static void *find(const char *name) {
  void *found = dlsym(driver, name);
  if (!found) {
    fprintf(stderr, "probe: the driver has no %s\n", name);
    exit(3);
  }
  return found;
}

#define CALL(name, types, ...)                                              \
  do {                                                                      \
    CUresult result_ = ((CUresult(*) types)find(#name))(__VA_ARGS__);       \
    if (result_ != 0) {                                                     \
      fprintf(stderr, "probe: %s returned %d\n", #name, result_);           \
      exit(4);                                                              \
    }                                                                       \
  } while (0)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static CUdevice device;
static handle context, module, spin;

static void start(void) {
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) {
    fprintf(stderr, "probe: %s\n", dlerror());
    exit(2);
  }
  CALL(cuInit, (unsigned), 0);
  CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
  CALL(cuDevicePrimaryCtxRetain, (handle *, CUdevice), &context, device);
  CALL(cuCtxSetCurrent, (handle), context);
}

static void load(void) {
  CALL(cuModuleLoadData, (handle *, const void *), &module, kernel);
  CALL(cuModuleGetFunction, (handle *, handle, const char *), &spin, module, "spin");
}

typedef CUresult (*launch_fn)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle,
                              void **, void **);

static void launch(launch_fn go, unsigned blocks, uint64_t cycles) {
  void *arguments[] = {&cycles};
  CUresult result = go(spin, blocks, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
  if (result != 0) {
    fprintf(stderr, "probe: cuLaunchKernel returned %d\n", result);
    exit(4);
  }
}

static int info(void) {
  size_t free_bytes, total, device_total;
  CALL(cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total);
  CALL(cuDeviceTotalMem_v2, (size_t *, CUdevice), &device_total, device);
  printf("free %zu total %zu device_total %zu\n", free_bytes, total, device_total);
  return 0;
}

static int fill(size_t piece) {
  CUresult (*alloc)(CUdeviceptr *, size_t) = (CUresult(*)(CUdeviceptr *, size_t))find("cuMemAlloc_v2");
  size_t held = 0;
  for (;;) {
    CUdeviceptr pointer = 0x5a5a;
    CUresult result = alloc(&pointer, piece);
    if (result == 0) {
      held += piece;
      continue;
    }
    printf("held %zu code %d pointer_untouched %d\n", held, result, pointer == 0x5a5a);
    return 0;
  }
}

static int launches(long count) {
  load();
  launch_fn go = (launch_fn)find("cuLaunchKernel");
  for (int i = 0; i < 1000; i++) launch(go, 1, 0);
  CALL(cuCtxSynchronize, (void));
  /* Small batches that fit into the driver's queue: a full queue would time the card, not the call. */
  double spent = 0;
  for (long done = 0; done < count; done += 256) {
    double from = now();
    for (int i = 0; i < 256; i++) launch(go, 1, 0);
    spent += now() - from;
    CALL(cuCtxSynchronize, (void));
  }
  printf("ns_per_launch %.1f\n", spent * 1e9 / count);
  return 0;
}

static int work(double seconds, double milliseconds) {
  load();
  int sms = 0, khz = 0;
  CALL(cuDeviceGetAttribute, (int *, int, CUdevice), &sms, 16, device);
  CALL(cuDeviceGetAttribute, (int *, int, CUdevice), &khz, 13, device);
  launch_fn go = (launch_fn)find("cuLaunchKernel");
  handle before, after;
  CALL(cuEventCreate, (handle *, unsigned), &before, 0);
  CALL(cuEventCreate, (handle *, unsigned), &after, 0);
  uint64_t cycles = (uint64_t)(khz * milliseconds);
  double card = 0, from = now();
  long kernels = 0;
  while (now() - from < seconds) {
    float took = 0;
    CALL(cuEventRecord, (handle, handle), before, NULL);
    launch(go, (unsigned)sms * 8, cycles);
    CALL(cuEventRecord, (handle, handle), after, NULL);
    CALL(cuEventSynchronize, (handle), after);
    CALL(cuEventElapsedTime, (float *, handle, handle), &took, before, after);
    card += took;
    kernels++;
  }
  printf("kernels %ld card_ms %.1f seconds %.3f\n", kernels, card, now() - from);
  return 0;
}

int main(int count, char **words) {
  const char *what = count > 1 ? words[1] : "";
  if (!strcmp(what, "info") && count == 2) return start(), info();
  if (!strcmp(what, "fill") && count == 3) return start(), fill((size_t)atol(words[2]) << 20);
  if (!strcmp(what, "launch") && count == 3) return start(), launches(atol(words[2]));
  if (!strcmp(what, "work") && count == 4) return start(), work(atof(words[2]), atof(words[3]));
  fprintf(stderr, "usage: probe info | fill MIB | launch N | work SECONDS MS\n");
  return 64;
}
