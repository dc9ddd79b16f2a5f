// Fills a card through the driver API: `allocate CHUNK-IN-BYTES [hold]`. What it is told, one line each; with `hold` it
// keeps the memory until its stdin ends.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*any)();

static any function(const char *name) {
  static void *cuda;
  if (!cuda && !(cuda = dlopen("libcuda.so.1", RTLD_NOW))) { puts(dlerror()); exit(1); }
  any found = (any)dlsym(cuda, name);
  if (!found) { printf("no %s\n", name); exit(1); }
  return found;
}

static void info(const char *when) {
  size_t free_bytes = 0, total = 0;
  int result = ((int (*)(size_t *, size_t *))function("cuMemGetInfo_v2"))(&free_bytes, &total);
  printf("info-%s %d\ntotal-%s %zu\nused-%s %zu\n", when, result, when, total, when, total - free_bytes);
}

int main(int argc, char **argv) {
  size_t chunk = strtoull(argc > 1 ? argv[1] : "0x4000000", 0, 0), whole = 0;
  int device = -1, n = 0, result;
  void *context = NULL;
  static unsigned long long memory[4096];
  printf("init %d\n", ((int (*)(unsigned))function("cuInit"))(0));
  printf("device %d\n", ((int (*)(int *, int))function("cuDeviceGet"))(&device, 0));
  printf("whole %d\n", ((int (*)(size_t *, int))function("cuDeviceTotalMem_v2"))(&whole, device));
  printf("size %zu\n", whole);
  printf("retain %d\n", ((int (*)(void **, int))function("cuDevicePrimaryCtxRetain"))(&context, device));
  printf("current %d\n", ((int (*)(void *))function("cuCtxSetCurrent"))(context));
  info("empty");
  while ((result = ((int (*)(unsigned long long *, size_t))function("cuMemAlloc_v2"))(&memory[n], chunk)) == 0 && n < 4095) n++;
  printf("chunks %d\nlast %d\n", n, result);
  info("full");
  if (argc > 2) {
    puts("holding");
    fflush(stdout);
    while (getchar() != EOF) {}
  }
  while (n > 0)
    if ((result = ((int (*)(unsigned long long))function("cuMemFree_v2"))(memory[--n]))) printf("free %d\n", result);
  info("again");
  return 0;
}
