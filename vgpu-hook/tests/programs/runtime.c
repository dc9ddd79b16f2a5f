// A program of the CUDA runtime: what it is told, a line for each call.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// As cuda_runtime_api.h declares them (that header needs some of the compiler's).
int cudaGetDeviceCount(int *count);
int cudaMalloc(void **memory, size_t bytes);
int cudaFree(void *memory);
int cudaMemGetInfo(size_t *free_bytes, size_t *total);
int PROPERTIES(void *properties, int device);
// In cudaDeviceProp behind the name, the uuid, the luid and its mask.
enum { TOTAL_GLOBAL_MEMORY = 288 };

int main(int argc, char **argv) {
  size_t bytes = argc > 1 ? strtoull(argv[1], 0, 0) : 1 << 20, free_bytes = 0, total = 0;
  void *memory = NULL;
  int devices = -1;
  printf("count %d\n", cudaGetDeviceCount(&devices));
  printf("devices %d\n", devices);
  printf("malloc %d\n", cudaMalloc(&memory, bytes));
  printf("info %d\n", cudaMemGetInfo(&free_bytes, &total));
  printf("total %zu\nused %zu\n", total, total - free_bytes);
  char properties[8192] = "";
  size_t total_of_properties = 0;
  printf("properties %d\n", PROPERTIES(properties, 0));
  memcpy(&total_of_properties, properties + TOTAL_GLOBAL_MEMORY, sizeof total_of_properties);
  printf("total-of-properties %zu\n", total_of_properties);
  void *all = NULL;
  printf("too-much %d\n", total ? cudaMalloc(&all, total) : -1);
  printf("free %d\n", cudaFree(memory));
  cudaMemGetInfo(&free_bytes, &total);
  printf("left %zu\n", total - free_bytes);
  return 0;
}
