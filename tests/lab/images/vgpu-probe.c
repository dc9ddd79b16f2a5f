/*
 * A program of the CUDA driver API, as small as they come, for lab.local/glibc:1. Each command prints one line of JSON
 * per fact, with plain numbers in bytes, so that a test can compare what different questions are answered.
 *
 *   vgpu-probe info                 what each card's total and free memory is, by every way of asking
 *   vgpu-probe alloc MIB [SECONDS]  takes that much and keeps it for so long (for ever without)
 *   vgpu-probe fill [SECONDS]       takes memory until none is given, in pieces of 64 MiB down to 2 MiB, then keeps it
 *   vgpu-probe storm PROCESSES      takes and gives back in that many processes, for ever; made to be killed
 *   vgpu-probe launch SECONDS US    kernels of US microseconds, four to eight ahead; how much of the time they ran
 *   vgpu-probe torch                what a caching allocator does: blocks, a pool of a stream, segments that grow
 *
 * Built twice: vgpu-probe asks the loader for libcuda.so.1 at run time, vgpu-probe-linked (-DLINKED) at its start.
 * The same program runs on a real card.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUhandle;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
/* CUmemAllocationProp, 32 bytes. */
typedef struct {
  int type, requested_handle_types;
  CUmemLocation location;
  void *win32;
  unsigned char compression, gpu_direct_rdma;
  unsigned short usage;
  unsigned char reserved[4];
} CUmemAllocationProp;
/* CUmemAccessDesc */
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum { OUT_OF_MEMORY = 2, PINNED = 1, LOCATION_DEVICE = 1, READ_WRITE = 3, RELEASE_THRESHOLD = 4 };

#define FUNCTIONS(X) \
  X(cuInit, (unsigned)) \
  X(cuDeviceGetCount, (int *)) \
  X(cuDeviceGet, (CUdevice *, int)) \
  X(cuDeviceGetName, (char *, int, CUdevice)) \
  X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
  X(cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
  X(cuDevicePrimaryCtxRetain, (CUhandle *, CUdevice)) \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
  X(cuCtxSetCurrent, (CUhandle)) \
  X(cuMemGetInfo_v2, (size_t *, size_t *)) \
  X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
  X(cuMemFree_v2, (CUdeviceptr)) \
  X(cuMemAllocAsync, (CUdeviceptr *, size_t, CUhandle)) \
  X(cuMemFreeAsync, (CUdeviceptr, CUhandle)) \
  X(cuDeviceGetDefaultMemPool, (CUhandle *, CUdevice)) \
  X(cuMemPoolSetAttribute, (CUhandle, int, void *)) \
  X(cuMemPoolTrimTo, (CUhandle, size_t)) \
  X(cuStreamCreate, (CUhandle *, unsigned)) \
  X(cuStreamSynchronize, (CUhandle)) \
  X(cuEventCreate, (CUhandle *, unsigned)) \
  X(cuEventRecord, (CUhandle, CUhandle)) \
  X(cuEventSynchronize, (CUhandle)) \
  X(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int)) \
  X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
  X(cuMemAddressFree, (CUdeviceptr, size_t)) \
  X(cuMemCreate, (unsigned long long *, size_t, const CUmemAllocationProp *, unsigned long long)) \
  X(cuMemRelease, (unsigned long long)) \
  X(cuMemMap, (CUdeviceptr, size_t, size_t, unsigned long long, unsigned long long)) \
  X(cuMemUnmap, (CUdeviceptr, size_t)) \
  X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) \
  X(cuModuleLoadData, (CUhandle *, const void *)) \
  X(cuModuleGetFunction, (CUhandle *, CUhandle, const char *)) \
  X(cuLaunchKernel, (CUhandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUhandle, void **, void **))

#ifdef LINKED
#define DECLARE(name, args) extern CUresult name args;
FUNCTIONS(DECLARE)
static void find(void) {}
#else
#define DECLARE(name, args) static CUresult (*name) args;
FUNCTIONS(DECLARE)
static void find(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) {
    printf("{\"error\": \"no driver\"}\n");
    exit(3);
  }
#define FIND(name, args) \
  if (!(*(void **)&name = dlsym(cuda, #name))) { \
    printf("{\"error\": \"no %s\"}\n", #name); \
    exit(3); \
  }
  FUNCTIONS(FIND)
}
#endif

static void check(const char *call, CUresult result) {
  if (result == 0) return;
  printf("{\"error\": \"%s\", \"result\": %d}\n", call, result);
  fflush(stdout);
  exit(result == OUT_OF_MEMORY ? 2 : 1);
}
#define CHECK(call, ...) check(#call, call(__VA_ARGS__))

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Seconds, or for ever. */
static void keep(const char *seconds) {
  fflush(stdout);
  if (seconds) usleep((useconds_t)(1e6 * atof(seconds)));
  else for (;;) pause();
}

static size_t used(void) {
  size_t free = 0, total = 0;
  CHECK(cuMemGetInfo_v2, &free, &total);
  return total - free;
}

/* nvmlMemory_t and nvmlMemory_v2_t */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;

/* What the library of nvidia-smi says of the card with that uuid. */
static void nvml(const char *uuid) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!library) return;
  int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
  int (*by_uuid)(const char *, void **) = (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByUUID");
  int (*memory)(void *, Memory *) = (int (*)(void *, Memory *))dlsym(library, "nvmlDeviceGetMemoryInfo");
  int (*memory2)(void *, Memory2 *) = (int (*)(void *, Memory2 *))dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
  void *device = 0;
  Memory m = {0, 0, 0};
  Memory2 m2 = {(unsigned)sizeof m2 | 2U << 24, 0, 0, 0, 0};
  if (!init || !by_uuid || init() || by_uuid(uuid, &device)) return;
  if (memory && memory(device, &m) == 0)
    printf(", \"nvmlTotal\": %llu, \"nvmlFree\": %llu, \"nvmlUsed\": %llu", m.total, m.free, m.used);
  if (memory2 && memory2(device, &m2) == 0)
    printf(", \"nvml2Total\": %llu, \"nvml2Free\": %llu, \"nvml2Used\": %llu", m2.total, m2.free, m2.used);
}

static int info(void) {
  int count = 0;
  CHECK(cuDeviceGetCount, &count);
  for (int i = 0; i < count; i++) {
    CUdevice device = 0;
    CUhandle context = 0;
    CUuuid id;
    char name[96] = "", uuid[48] = "GPU-";
    size_t free = 0, total = 0, card = 0;
    CHECK(cuDeviceGet, &device, i);
    CHECK(cuDeviceGetName, name, (int)sizeof name, device);
    CHECK(cuDeviceGetUuid_v2, &id, device);
    for (int b = 0; b < 16; b++)
      sprintf(uuid + strlen(uuid), "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "", id.bytes[b]);
    CHECK(cuDeviceTotalMem_v2, &card, device);
    CHECK(cuDevicePrimaryCtxRetain, &context, device);
    CHECK(cuCtxSetCurrent, context);
    CHECK(cuMemGetInfo_v2, &free, &total);
    printf("{\"uuid\": \"%s\", \"name\": \"%s\", \"deviceTotal\": %zu, \"total\": %zu, \"free\": %zu", uuid, name, card, total, free);
    nvml(uuid);
    printf("}\n");
    CHECK(cuDevicePrimaryCtxRelease_v2, device);
  }
  return 0;
}

static CUdevice first(void) {
  CUdevice device = 0;
  CUhandle context = 0;
  CHECK(cuDeviceGet, &device, 0);
  CHECK(cuDevicePrimaryCtxRetain, &context, device);
  CHECK(cuCtxSetCurrent, context);
  return device;
}

static int alloc(const char *mib, const char *seconds) {
  CUdeviceptr at = 0;
  first();
  CHECK(cuMemAlloc_v2, &at, (size_t)atoll(mib) << 20);
  printf("{\"given\": %lld, \"used\": %zu}\n", atoll(mib) << 20, used());
  keep(seconds);
  return 0;
}

static int fill(const char *seconds) {
  size_t given = 0, free = 0, total = 0;
  CUresult result = 0;
  first();
  size_t overhead = used();
  for (size_t piece = (size_t)64 << 20; piece >= (size_t)2 << 20; piece /= 2)
    for (;;) {
      CUdeviceptr at = 0x5a5a;
      result = cuMemAlloc_v2(&at, piece);
      if (result != 0) {
        if (result != OUT_OF_MEMORY || at != 0x5a5a) check("cuMemAlloc_v2", result == OUT_OF_MEMORY ? -1 : result);
        break;
      }
      given += piece;
    }
  CHECK(cuMemGetInfo_v2, &free, &total);
  printf("{\"given\": %zu, \"overhead\": %zu, \"total\": %zu, \"free\": %zu, \"result\": %d}\n", given, overhead, total, free, result);
  keep(seconds);
  return 0;
}

static int storm(int processes) {
  for (int i = 0; i < processes; i++) {
    pid_t child = fork();
    if (child == 0) {
      CHECK(cuInit, 0);
      first();
      unsigned dice = (unsigned)getpid();
      CUdeviceptr held[16] = {0};
      for (;;) {
        int k = rand_r(&dice) % 16;
        if (held[k]) {
          CHECK(cuMemFree_v2, held[k]);
          held[k] = 0;
        } else {
          CUresult result = cuMemAlloc_v2(&held[k], (size_t)(1 + rand_r(&dice) % 16) << 20);
          if (result == OUT_OF_MEMORY) held[k] = 0;
          else check("cuMemAlloc_v2", result);
        }
      }
    }
    printf("{\"pid\": %d}\n", child);
  }
  fflush(stdout);
  while (wait(0) > 0 || errno == EINTR) {}
  return 0;
}

static int launch(double seconds, long us) {
  char name[32], image[512];
  CUhandle module = 0, kernel = 0;
  first();
  snprintf(name, sizeof name, "busy_%ldus", us);
  /* Turns until that much of the card's time has passed. */
  snprintf(image, sizeof image,
           ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry %s() {\n.reg .u64 %%t<3>;\n.reg .pred %%p;\n"
           "mov.u64 %%t0, %%globaltimer;\nagain:\nmov.u64 %%t1, %%globaltimer;\nsub.u64 %%t2, %%t1, %%t0;\n"
           "setp.lt.u64 %%p, %%t2, %ld;\n@%%p bra again;\nret;\n}\n", name, us * 1000);
  CHECK(cuModuleLoadData, &module, image);
  CHECK(cuModuleGetFunction, &kernel, module, name);
  /* While four run, the next four are queued: the card is never idle for want of a launch, which a large share could not
     stand beside others. */
  CUhandle ended[2];
  long launches = 0, turns = 0;
  for (int i = 0; i < 2; i++) CHECK(cuEventCreate, &ended[i], 0);
  double from = now(), half = from + seconds / 2, middle = 0, until = from + seconds;
  long before = 0;
  while (now() < until) {
    if (!middle && now() >= half) {
      middle = now();
      before = launches;
    }
    for (int ahead = 0; ahead < 4; ahead++) CHECK(cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
    CHECK(cuEventRecord, ended[turns++ % 2], 0);
    if (turns < 2) continue;
    CHECK(cuEventSynchronize, ended[turns % 2]);
    launches += 4;
  }
  double end = now(), busy = 1e-6 * (double)us;
  printf("{\"launches\": %ld, \"seconds\": %.3f, \"share\": %.4f, \"lateShare\": %.4f}\n", launches, end - from,
         busy * (double)launches / (end - from), busy * (double)(launches - before) / (end - middle));
  return 0;
}

/* One kind of memory that a framework takes: how much of the slice it gets at most, and what is left when it let go. */
static void report(const char *kind, size_t given, size_t before, CUresult result) {
  size_t free = 0, total = 0;
  CHECK(cuMemGetInfo_v2, &free, &total);
  printf("{\"kind\": \"%s\", \"given\": %zu, \"before\": %zu, \"total\": %zu, \"free\": %zu, \"result\": %d}\n", kind, given, before,
         total, free, result);
}

static int torch(void) {
  enum { MOST = 65536 };
  static CUdeviceptr blocks[MOST];
  static unsigned long long handles[MOST];
  const size_t small = (size_t)2 << 20, large = (size_t)20 << 20;
  CUdevice device = first();
  size_t before = used(), given = 0;
  CUresult result = 0;
  int count = 0;

  /* Blocks of 2 MiB for what is small and 20 MiB for what is not; what is freed stays in the cache, until the card gives
     no more: then the cache is emptied and the same is asked again. */
  for (int round = 0; round < 2; round++) {
    for (result = 0, given = 0, count = 0; count < MOST; count++) {
      size_t size = count % 4 == 3 ? large : small;
      if ((result = cuMemAlloc_v2(&blocks[count], size)) != 0) break;
      given += size;
    }
    report("blocks", given, before, result);
    while (count > 0) CHECK(cuMemFree_v2, blocks[--count]);
  }

  /* A pool that keeps what it has. */
  CUhandle pool = 0, stream = 0;
  uint64_t keep_all = UINT64_MAX;
  CHECK(cuStreamCreate, &stream, 1);
  CHECK(cuDeviceGetDefaultMemPool, &pool, device);
  CHECK(cuMemPoolSetAttribute, pool, RELEASE_THRESHOLD, &keep_all);
  before = used();
  for (result = 0, given = 0, count = 0; count < MOST; count++) {
    if ((result = cuMemAllocAsync(&blocks[count], large, stream)) != 0) break;
    given += large;
  }
  report("pool", given, before, result);
  while (count > 0) CHECK(cuMemFreeAsync, blocks[--count], stream);
  CHECK(cuStreamSynchronize, stream);
  report("pool kept", given, before, 0);
  CHECK(cuMemPoolTrimTo, pool, 0);
  report("pool trimmed", 0, before, 0);

  /* A segment of addresses that grows by pieces, and shrinks. */
  CUmemAllocationProp what;
  CUmemAccessDesc access = {{LOCATION_DEVICE, device}, READ_WRITE};
  memset(&what, 0, sizeof what);
  what.type = PINNED;
  what.location = access.location;
  size_t piece = 0, segment = 0, free = 0;
  CUdeviceptr start = 0;
  CHECK(cuMemGetAllocationGranularity, &piece, &what, 0);
  if (piece < large) piece = (large + piece - 1) / piece * piece;
  CHECK(cuMemGetInfo_v2, &free, &segment);
  segment = (segment / piece + 8) * piece;
  CHECK(cuMemAddressReserve, &start, segment, 0, 0, 0);
  before = used();
  for (result = 0, given = 0, count = 0; given + piece <= segment; count++) {
    if ((result = cuMemCreate(&handles[count], piece, &what, 0)) != 0) break;
    CHECK(cuMemMap, start + given, piece, 0, handles[count], 0);
    CHECK(cuMemSetAccess, start + given, piece, &access, 1);
    given += piece;
  }
  report("segment", given, before, result);
  for (int k = 0; k < count; k++) {
    CHECK(cuMemUnmap, start + (size_t)k * piece, piece);
    CHECK(cuMemRelease, handles[k]);
  }
  CHECK(cuMemAddressFree, start, segment);
  report("segment freed", 0, before, 0);
  return 0;
}

int main(int argc, char **argv) {
  const char *verb = argc > 1 ? argv[1] : "";
  const char *word = argc > 2 ? argv[2] : 0, *next = argc > 3 ? argv[3] : 0;
  int known = !strcmp(verb, "info") || !strcmp(verb, "fill") || !strcmp(verb, "torch") ||
              (word && (!strcmp(verb, "alloc") || !strcmp(verb, "storm"))) || (next && !strcmp(verb, "launch"));
  if (!known) {
    fprintf(stderr, "usage: vgpu-probe info | alloc MIB [SECONDS] | fill [SECONDS] | storm PROCESSES | launch SECONDS US | torch\n");
    return 64;
  }
  find();
  /* Each of its processes starts the driver itself. */
  if (!strcmp(verb, "storm")) return storm(atoi(word));
  CHECK(cuInit, 0);
  if (!strcmp(verb, "info")) return info();
  if (!strcmp(verb, "alloc")) return alloc(word, next);
  if (!strcmp(verb, "fill")) return fill(word);
  if (!strcmp(verb, "launch")) return launch(atof(word), atol(next));
  return torch();
}
