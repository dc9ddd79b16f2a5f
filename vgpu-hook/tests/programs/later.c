// A library that is loaded later, or preloaded: it looks names up behind itself, and in its constructor.
#define _GNU_SOURCE
#include <dlfcn.h>

void *later_seen[2];
// Stands before the C library's for whoever asks behind the program.
int abs(int x) { return x < 0 ? -x : x; }

__attribute__((constructor)) static void start(void) {
  later_seen[0] = dlsym(RTLD_NEXT, "malloc");
  later_seen[1] = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
}

void *later_next(const char *name) { return dlsym(RTLD_NEXT, name); }
void *later_versioned(const char *name) { return dlvsym(RTLD_NEXT, name, "GLIBC_2.2.5"); }
