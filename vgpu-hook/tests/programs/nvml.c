// What NVML says about card 0: `nvml`. One line each.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long bytes; } process_v1;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } process_v2;

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; unsigned long long protected; } detail;
typedef struct { unsigned version, mode, count; detail *entries; } details;

static void *function(const char *name) {
  static void *nvml;
  if (!nvml && !(nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW))) { puts(dlerror()); exit(1); }
  void *found = dlsym(nvml, name);
  if (!found) { printf("no %s\n", name); exit(1); }
  return found;
}

int main(void) {
  void *device = NULL;
  printf("init %d\n", ((int (*)(void))function("nvmlInit_v2"))());
  printf("handle %d\n", ((int (*)(unsigned, void **))function("nvmlDeviceGetHandleByIndex_v2"))(0, &device));
  memory m = {0};
  printf("memory %d\n", ((int (*)(void *, memory *))function("nvmlDeviceGetMemoryInfo"))(device, &m));
  printf("total %llu\nfree %llu\nused %llu\n", m.total, m.free, m.used);
  memory_v2 v2 = {.version = sizeof v2 | 2 << 24};
  printf("memory-v2 %d\n", ((int (*)(void *, memory_v2 *))function("nvmlDeviceGetMemoryInfo_v2"))(device, &v2));
  printf("total-v2 %llu\nreserved-v2 %llu\nfree-v2 %llu\nused-v2 %llu\n", v2.total, v2.reserved, v2.free, v2.used);
  v2.version = 7;
  printf("wrong-version %d\n", ((int (*)(void *, memory_v2 *))function("nvmlDeviceGetMemoryInfo_v2"))(device, &v2));
  printf("no-memory %d\n", ((int (*)(void *, memory *))function("nvmlDeviceGetMemoryInfo"))(device, NULL));
  int (*compute)(void *, unsigned *, process_v2 *) = (int (*)(void *, unsigned *, process_v2 *))function("nvmlDeviceGetComputeRunningProcesses_v3");
  unsigned count = 0;
  printf("ask %d\n", compute(device, &count, NULL));
  printf("count %u\n", count);
  process_v2 list[64];
  memset(list, 0, sizeof list);
  count = 64;
  printf("list %d\n", compute(device, &count, list));
  for (unsigned i = 0; i < count; i++) printf("process-%u %llu\n", list[i].pid, list[i].bytes);
  printf("no-count %d\n", compute(device, NULL, list));
  count = 64;
  int (*graphics)(void *, unsigned *, process_v2 *) = (int (*)(void *, unsigned *, process_v2 *))function("nvmlDeviceGetGraphicsRunningProcesses_v3");
  printf("graphics %d\n", graphics(device, &count, list));
  printf("graphics-count %u\n", count);
  int (*of)(void *, details *) = (int (*)(void *, details *))function("nvmlDeviceGetRunningProcessDetailList");
  details d = {.version = sizeof d | 1 << 24};
  printf("details-ask %d\n", of(device, &d));
  printf("details-count %u\n", d.count);
  detail entries[64];
  memset(entries, 0, sizeof entries);
  d.count = 64, d.entries = entries;
  printf("details %d\n", of(device, &d));
  for (unsigned i = 0; i < d.count; i++) printf("detail-%u %llu\n", entries[i].pid, entries[i].bytes);
  d.count = 64, d.mode = 1;
  printf("details-graphics %d\n", of(device, &d));
  printf("details-graphics-count %u\n", d.count);
  d.version = sizeof d | 2 << 24;
  printf("details-version %d\n", of(device, &d));
  printf("details-none %d\n", of(device, NULL));
  return 0;
}
