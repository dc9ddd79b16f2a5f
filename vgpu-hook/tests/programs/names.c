// Looks up names in all ways that the loader has, from several threads, and from a library that is loaded later
// (`later.c`). One line for each answer: way, name, what was found. `names PATH-OF-LATER < NAMES`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char names[1024][96];
static int count;

// What was found, in words that do not change from run to run: image and offset.
static void say(FILE *out, const char *way, const char *name, void *found) {
  Dl_info info;
  if (found && dladdr(found, &info) && info.dli_fname) {
    const char *file = strrchr(info.dli_fname, '/');
    fprintf(out, "%s %s %s+%lx\n", way, name, file ? file + 1 : info.dli_fname,
            (unsigned long)((char *)found - (char *)info.dli_fbase));
  } else {
    fprintf(out, "%s %s %s\n", way, name, found ? "somewhere" : "nothing");
  }
}

static void *look(void *text) {
  char **buffer = text;
  size_t size;
  FILE *out = open_memstream(buffer, &size);
  void *libc = dlopen("libc.so.6", RTLD_LAZY), *libm = dlopen("libm.so.6", RTLD_LAZY);
  void *all = dlopen(NULL, RTLD_LAZY);
  for (int i = 0; i < count; i++) {
    const char *name = names[i];
    say(out, "default", name, dlsym(RTLD_DEFAULT, name));
    say(out, "next", name, dlsym(RTLD_NEXT, name));
    say(out, "next-again", name, dlsym(RTLD_NEXT, name));
    say(out, "all", name, dlsym(all, name));
    say(out, "libc", name, dlsym(libc, name));
    say(out, "libm", name, dlsym(libm, name));
    say(out, "versioned", name, dlvsym(RTLD_DEFAULT, name, "GLIBC_2.2.5"));
    say(out, "versioned-next", name, dlvsym(RTLD_NEXT, name, "GLIBC_2.2.5"));
    say(out, "versioned-libc", name, dlvsym(libc, name, "GLIBC_2.17"));
    say(out, "no-version", name, dlvsym(libc, name, "GLIBC_9.9"));
    dlsym(libc, name);
    const char *error = dlerror();
    fprintf(out, "error %s %s\n", name, error ? error : "none");
  }
  fclose(out);
  return NULL;
}

int main(int argc, char **argv) {
  while (count < 1024 && scanf("%95s", names[count]) == 1) count++;
  pthread_t threads[4];
  char *texts[4];
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, look, &texts[i]);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  for (int i = 1; i < 4; i++)
    if (strcmp(texts[0], texts[i])) { puts("threads differ"); return 1; }
  fputs(texts[0], stdout);
  if (argc > 1) {
    void *later = dlopen(argv[1], RTLD_NOW);
    if (!later) { puts(dlerror()); return 1; }
    void *(*next)(const char *) = (void *(*)(const char *))dlsym(later, "later_next");
    void *(*versioned)(const char *) = (void *(*)(const char *))dlsym(later, "later_versioned");
    for (int i = 0; i < count; i++) {
      say(stdout, "later-next", names[i], next(names[i]));
      say(stdout, "later-versioned", names[i], versioned(names[i]));
    }
    void **seen = dlsym(later, "later_seen");
    say(stdout, "constructor", "malloc", seen[0]);
    say(stdout, "constructor", "omp_get_num_threads", seen[1]);
  }
  return 0;
}
