// A driver with one card of 80 GiB, a context, and memory that is only counted: for machines on which the fake driver,
// which reserves terabytes of addresses, is too slow (an emulated one).
#include <stddef.h>
#include <string.h>

static size_t used, next = 1 << 30;
static struct { unsigned long long address; size_t bytes; } live[4096];
static void *current;
static int context;
enum { TOTAL_GIB = 80, CONTEXT_MIB = 400 };
static const size_t total = (size_t)TOTAL_GIB << 30;

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 12090; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0x11 + device, 16); return 0; }
int cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = total; return device ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **made, int device) {
  if (device) return 101;
  if (!context++) used += (size_t)CONTEXT_MIB << 20;
  *made = &context;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = context > 0; return device ? 101 : 0; }
int cuCtxSetCurrent(void *made) { current = made; return 0; }
int cuCtxGetCurrent(void **made) { *made = current; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return current ? 0 : 201; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) { *free_bytes = total - used; *all = total; return current ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *memory, size_t bytes) {
  if (!current) return 201;
  for (int i = 0; i < 4096; i++)
    if (!live[i].address && used + bytes <= total) {
      *memory = live[i].address = next;
      live[i].bytes = bytes;
      next += bytes;
      used += bytes;
      return 0;
    }
  return 2;
}
int cuMemFree_v2(unsigned long long memory) {
  for (int i = 0; i < 4096; i++)
    if (memory && live[i].address == memory) { used -= live[i].bytes; live[i].address = 0; return 0; }
  return 1;
}
