// A program that does nothing with a GPU: a thread, some memory, a look-up, output.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
  char *text = malloc(64);
  snprintf(text, 64, "hello from %s %d", strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0], argc);
  puts(text);
  free(text);
  return 7;
}
