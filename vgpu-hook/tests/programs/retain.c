// One thread maps memory and retains what is mapped, while another one unmaps it and two more keep the library's books busy. Tells in
// the end what is charged and what the card gave.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long ptr;
typedef int res;
struct location { unsigned kind; int id; };
struct allocation { unsigned kind, handles; struct location location; void *win32; unsigned char flags[8]; };
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuMemAddressReserve(ptr *, size_t, size_t, ptr, ptr);
res cuMemCreate(ptr *, size_t, const struct allocation *, ptr);
res cuMemRelease(ptr);
res cuMemMap(ptr, size_t, size_t, ptr, ptr);
res cuMemUnmap(ptr, size_t);
res cuMemRetainAllocationHandle(ptr *, void *);
res cuMemGetInfo_v2(size_t *, size_t *);
ptr fake_cuda_given(int);

enum { PART = 2 << 20, OTHERS = 512, ROUNDS = 2000 };
static const struct allocation properties = { .kind = 1, .handles = 1, .location = { 1, 0 } };
static pthread_barrier_t meet;
static void *context;
static ptr range, other;
static atomic_int is_over;

static void must(res result) {
  if (!result) return;
  fprintf(stderr, "a call answers %d\n", result);
  exit(4);
}

static void *keep_busy(void *unused) {
  must(cuCtxSetCurrent(context));
  while (!is_over) cuMemUnmap(other, 1ull << 45);
  return unused;
}

static void *unmap(void *unused) {
  must(cuCtxSetCurrent(context));
  for (int round = 0; round < ROUNDS; round++) {
    pthread_barrier_wait(&meet);
    for (volatile int wait = round * 7919 % 20000; wait > 0; wait--);
    must(cuMemUnmap(range, PART));
    pthread_barrier_wait(&meet);
  }
  return unused;
}

int main(void) {
  pthread_t threads[3];
  ptr handle;
  size_t free, total;
  int retained = 0;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  must(cuMemAddressReserve(&range, PART, 0, 0, 0));
  must(cuMemAddressReserve(&other, (ptr)PART * OTHERS, 0, 0, 0));
  pthread_barrier_init(&meet, 0, 2);
  pthread_create(&threads[0], 0, unmap, 0);
  for (int i = 1; i < 3; i++) pthread_create(&threads[i], 0, keep_busy, 0);
  for (int round = 0; round < ROUNDS; round++) {
    must(cuMemCreate(&handle, PART, &properties, 0));
    must(cuMemMap(range, PART, 0, handle, 0));
    must(cuMemRelease(handle));
    pthread_barrier_wait(&meet);
    retained += !cuMemRetainAllocationHandle(&handle, (void *)range);
    pthread_barrier_wait(&meet);
  }
  is_over = 1;
  for (int i = 0; i < 3; i++) pthread_join(threads[i], 0);
  must(cuMemGetInfo_v2(&free, &total));
  printf("retained %d\ncharged %zu\ngiven %llu\n", retained, total - free, fake_cuda_given(0));
  return 0;
}
