// Resolves every driver function in all ways there are, and says which function of which library each way leads to:
// `way name version flags symbol library`. It is linked with the driver, and a generated table `linked` holds the address
// that each name has for a program that is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct linked { const char *name; void *address; };
struct triple { const char *name; int version; unsigned long flags; };
extern const struct linked linked[];
extern const int linked_count;
extern const struct triple triples[];
extern const int triple_count;

static void say(const char *way, const char *name, int version, unsigned long flags, void *found) {
  Dl_info info;
  if (!found) { printf("%s %s %d %lu nothing -\n", way, name, version, flags); return; }
  if (!dladdr(found, &info)) { printf("%s %s %d %lu somewhere -\n", way, name, version, flags); return; }
  const char *file = strrchr(info.dli_fname, '/');
  printf("%s %s %d %lu %s %s\n", way, name, version, flags,
         info.dli_sname && info.dli_saddr == found ? info.dli_sname : "unnamed", file ? file + 1 : info.dli_fname);
}

int main(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *all = dlopen(NULL, RTLD_LAZY), *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!cuda || !nvml) { puts(dlerror()); return 1; }
  for (int i = 0; i < linked_count; i++) {
    const char *name = linked[i].name;
    say("link", name, 0, 0, linked[i].address);
    say("default", name, 0, 0, dlsym(RTLD_DEFAULT, name));
    say("next", name, 0, 0, dlsym(RTLD_NEXT, name));
    say("handle", name, 0, 0, dlsym(name[0] == 'n' ? nvml : cuda, name));
    say("all", name, 0, 0, dlsym(all, name));
  }
  int (*get1)(const char *, void **, int, unsigned long) = 0;
  int (*get2)(const char *, void **, int, unsigned long, int *) = 0;
  get1 = (int (*)(const char *, void **, int, unsigned long))dlsym(cuda, "cuGetProcAddress");
  get2 = (int (*)(const char *, void **, int, unsigned long, int *))dlsym(cuda, "cuGetProcAddress_v2");
  for (int i = 0; i < triple_count; i++) {
    const struct triple *t = &triples[i];
    void *found = NULL;
    int status = -1, result = get2(t->name, &found, t->version, t->flags, &status);
    say("v2", t->name, t->version, t->flags, found);
    printf("status %s %d %lu %d %d\n", t->name, t->version, t->flags, result, status);
    found = NULL;
    result = get1(t->name, &found, t->version, t->flags);
    say("v1", t->name, t->version, t->flags, found);
  }
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
  printf("init %d\n", init(0));
  printf("nvml %d\n", ((int (*)(void))dlsym(nvml, "nvmlInit_v2"))());
  return 0;
}
