/* versions FILE: reads lines of a base name, a CUDA version and flags; says which function cuGetProcAddress_v2 gives for each, by the
 * name under which its library exports it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*look_up)(const char *, void **, int, uint64_t, int *);

int main(int count, char **words) {
  if (count != 2 || !freopen(words[1], "r", stdin)) return 64;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return 1;
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
  look_up get = (look_up)dlsym(driver, "cuGetProcAddress_v2");
  if (!init || !get || init(0) != 0) return 2;
  char name[128];
  int version;
  unsigned long flags;
  while (scanf("%127s %d %lu", name, &version, &flags) == 3) {
    void *function = NULL;
    int status = -1;
    int result = get(name, &function, version, flags, &status);
    Dl_info about = {0};
    const char *symbol = "-";
    if (function) symbol = dladdr(function, &about) && about.dli_sname ? about.dli_sname : "?";
    printf("%s %d %lu: %d %d %s\n", name, version, flags, result, status, symbol);
  }
  return 0;
}
