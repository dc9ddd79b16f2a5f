// Another library that stands in for `dlsym`, as profilers do: it calls the next one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

int interposer_calls;

void *dlsym(void *handle, const char *name) {
  static void *(*real)(void *, const char *);
  if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  if (!real) abort();
  if (++interposer_calls > 100000) abort();
  return real(handle, name);
}
