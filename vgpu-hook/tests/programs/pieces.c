// Threads take and give pieces of blocks that are paid for, while another one asks again and again for all that is left: tells how often
// that was refused.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long ptr;
typedef int res;
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuMemAlloc_v2(ptr *, size_t);
res cuMemFree_v2(ptr);
res cuMemGetInfo_v2(size_t *, size_t *);

enum { THREADS = 8, ROUNDS = 2000, PIECE = 512 };
static void *context;
static atomic_int is_over;

static void must(res result) {
  if (!result) return;
  fprintf(stderr, "a call answers %d\n", result);
  exit(4);
}

static void *churn(void *unused) {
  ptr piece;
  must(cuCtxSetCurrent(context));
  while (!is_over) {
    must(cuMemAlloc_v2(&piece, PIECE));
    must(cuMemFree_v2(piece));
  }
  return unused;
}

int main(void) {
  pthread_t threads[THREADS];
  ptr address;
  size_t left, total;
  int refused = 0;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  // The block stays.
  must(cuMemAlloc_v2(&address, PIECE));
  must(cuMemGetInfo_v2(&left, &total));
  for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], 0, churn, 0);
  for (int round = 0; round < ROUNDS; round++) {
    res result = cuMemAlloc_v2(&address, left);
    if (result == 2) refused++;
    else { must(result); must(cuMemFree_v2(address)); }
  }
  is_over = 1;
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
  printf("refused %d\n", refused);
  return 0;
}
