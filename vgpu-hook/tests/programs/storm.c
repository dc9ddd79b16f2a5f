// Threads that take and give memory all at once: `storm WHAT SEED ROUNDS`. At points where all of them wait, what the card gave
// the process is told beside what the library says of it.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long ptr;
typedef int res;
struct array3d { size_t width, height, depth; unsigned format, channels, flags; };
struct requirements { size_t size, alignment; unsigned reserved[4]; };
struct location { unsigned kind; int id; };
struct allocation { unsigned kind, handles; struct location location; void *win32; unsigned char flags[8]; };

res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuCtxSynchronize(void);
res cuMemGetInfo_v2(size_t *, size_t *);
res cuMemAlloc_v2(ptr *, size_t);
res cuMemFree_v2(ptr);
res cuMemAllocPitch_v2(ptr *, size_t *, size_t, size_t, unsigned);
res cuMemAllocAsync(ptr *, size_t, void *);
res cuMemFreeAsync(ptr, void *);
res cuMemCreate(ptr *, size_t, const struct allocation *, ptr);
res cuMemRelease(ptr);
res cuMemAddressReserve(ptr *, size_t, size_t, ptr, ptr);
res cuMemAddressFree(ptr, size_t);
res cuMemMap(ptr, size_t, size_t, ptr, ptr);
res cuMemUnmap(ptr, size_t);
res cuArray3DCreate_v2(void **, const struct array3d *);
res cuArrayDestroy(void *);
res cuArrayGetMemoryRequirements(struct requirements *, void *, int);
res cuMipmappedArrayCreate(void **, const struct array3d *, unsigned);
res cuMipmappedArrayDestroy(void *);
res cuMipmappedArrayGetMemoryRequirements(struct requirements *, void *, int);
res cuModuleLoadData(void **, const void *);
res cuModuleUnload(void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuCtxPopCurrent_v2(void **);
res cuCtxSetLimit(unsigned, size_t);
res cuDeviceGetDevResource(int, void *, unsigned);
res cuDevResourceGenerateDesc(void **, void *, unsigned);
res cuGreenCtxCreate(void **, void *, int, unsigned);
res cuGreenCtxDestroy(void *);
ptr fake_cuda_given(int);
ptr fake_cuda_peak(int);

enum { MOST_THREADS = 8, SLOTS = 24, SMALL = 1 << 20 };
enum kind { NOTHING, PLAIN, PHYSICAL, ARRAY, MIPMAP, MODULE, CONTEXT };
struct slot { enum kind kind; void *handle; ptr address; size_t needed; };

static void *context;
static unsigned seed, threads, phases, rounds;
static pthread_barrier_t barrier;
// Answers that no call should give, and refusals for want of memory.
static atomic_int wrong, refused;
// What small arrays there are, and what the driver says that they need.
static atomic_llong arrays, needed;

static ptr next(ptr *state) {
  *state ^= *state << 13; *state ^= *state >> 7; *state ^= *state << 17;
  return *state;
}

static int made(res result) {
  if (result == 2) refused++;
  else if (result) wrong++;
  return !result;
}

static void count_array(struct slot *slot, int by) {
  if (slot->needed > SMALL) return;
  arrays += by;
  needed += by * (long long)slot->needed;
}

// Mostly small: lines, planes, boxes and layers of 512 bytes to 1 MiB, and some larger ones.
static struct array3d shape(ptr random) {
  static const unsigned formats[] = { 0x01, 0x02, 0x20 };
  struct array3d s = { .format = formats[random % 3], .channels = 1 << (random >> 2) % 3 };
  size_t side = 1 + (random >> 8) % 200;
  s.width = side;
  switch ((random >> 4) % 5) {
  case 0: s.width = 1 + (random >> 8) % 4000; break;
  case 1: s.height = 1 + (random >> 20) % 200; break;
  case 2: s.height = 1 + (random >> 20) % 24; s.depth = 1 + (random >> 30) % 8; break;
  case 3: s.height = 1 + (random >> 20) % 24; s.depth = 1 + (random >> 30) % 6; s.flags = 1; break;
  case 4: s.width = 400 + side; s.height = 1000; break;
  }
  return s;
}

static void take(struct slot *slot, ptr random) {
  struct requirements r = { 0 };
  struct allocation p = { .kind = 1, .handles = 1, .location = { 1, 0 } };
  ptr of = random >> 40;
  switch (random % 16) {
  case 0: case 1: case 2:
    if (made(cuMemAlloc_v2(&slot->address, 1 + of % SMALL))) slot->kind = PLAIN;
    break;
  case 3: case 4:
    if (made(cuMemAlloc_v2(&slot->address, SMALL + 1 + of % (4 << 20)))) slot->kind = PLAIN;
    break;
  case 5: case 6:
    if (made(cuMemCreate(&slot->address, (1 + of % 2) << 21, &p, 0))) slot->kind = PHYSICAL;
    break;
  case 7: {
    struct array3d s = shape(random >> 8);
    s.height = s.height ? s.height : 1;
    if (!made(cuMipmappedArrayCreate(&slot->handle, &s, 3))) break;
    slot->kind = MIPMAP;
    if (cuMipmappedArrayGetMemoryRequirements(&r, slot->handle, 0)) wrong++;
    break;
  }
  default: {
    struct array3d s = shape(random >> 8);
    if (!made(cuArray3DCreate_v2(&slot->handle, &s))) break;
    slot->kind = ARRAY;
    if (cuArrayGetMemoryRequirements(&r, slot->handle, 0)) wrong++;
  }
  }
  slot->needed = r.size;
  if (slot->kind == ARRAY || slot->kind == MIPMAP) count_array(slot, 1);
}

static void give(struct slot *slot) {
  res result = 0;
  switch (slot->kind) {
  case NOTHING: break;
  case PLAIN: result = cuMemFree_v2(slot->address); break;
  case PHYSICAL: result = cuMemRelease(slot->address); break;
  case ARRAY: count_array(slot, -1); result = cuArrayDestroy(slot->handle); break;
  case MIPMAP: count_array(slot, -1); result = cuMipmappedArrayDestroy(slot->handle); break;
  case MODULE: result = cuModuleUnload(slot->handle); break;
  case CONTEXT: result = cuCtxDestroy_v2(slot->handle); break;
  }
  if (result) wrong++;
  slot->kind = NOTHING;
}

static void load(struct slot *slot, ptr random) {
  // An ELF file whose section headers, none, lie at its end.
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, (2 << 20) + random % (6 << 20) };
  if (made(cuModuleLoadData(&slot->handle, image))) slot->kind = MODULE;
}

// A context with a heap of its own.
static void make_context(struct slot *slot, ptr random) {
  void *popped;
  if (!made(cuCtxCreate_v2(&slot->handle, 0, 0))) return;
  slot->kind = CONTEXT;
  made(cuCtxSetLimit(2, (8 << 20) + random % (40 << 20)));
  if (cuCtxPopCurrent_v2(&popped)) wrong++;
}

static void tell(const char *when) {
  size_t free_bytes = 0, total = 0;
  if (cuMemGetInfo_v2(&free_bytes, &total)) wrong++;
  printf("%s %llu %zu %lld %lld\n", when, fake_cuda_given(0), total - free_bytes, (long long)arrays, (long long)needed);
}

// Everybody waits, and the first one tells.
static void quiet(int me, const char *when) {
  pthread_barrier_wait(&barrier);
  if (!me) tell(when);
  pthread_barrier_wait(&barrier);
}

// With `modules` the first two threads load images and the others allocate. With `contexts` the first two make contexts, too, and the
// last one makes arrays.
static int modules, contexts;
static void *mixing(void *number) {
  int me = (intptr_t)number;
  ptr random = 88172645463325252ull * (seed + 1) + 1442695040888963407ull * (me + 1);
  struct slot slots[SLOTS] = { 0 };
  if (cuCtxSetCurrent(context)) wrong++;
  for (unsigned phase = 0; phase < phases; phase++) {
    for (unsigned round = 0; round < rounds / phases / threads; round++) {
      struct slot *slot = &slots[next(&random) % SLOTS];
      ptr what = next(&random);
      if (slot->kind) give(slot);
      else if (contexts && me < 2 && what % 2) make_context(slot, what >> 8);
      else if (modules && me < 2) load(slot, what >> 8);
      else if (contexts && me == 3) take(slot, what | 8); // arrays alone
      // No arrays, and small pieces for one thread alone: two that are the first in a block at the same time may both pay for it.
      else if (modules) take(slot, (what & ~0xffull) | (me == 2 ? what % 7 : 3 + what % 4));
      else take(slot, what);
    }
    // What they are charged is not exact while there are some.
    for (int i = 0; contexts && me == 3 && i < SLOTS; i++) give(&slots[i]);
    quiet(me, "quiet");
  }
  for (int i = 0; i < SLOTS; i++) give(&slots[i]);
  quiet(me, "end");
  return 0;
}

static res free_in_stream(ptr address) { return cuMemFreeAsync(address, 0); }

static atomic_ullong shared;
static res (*release)(ptr), (*other)(ptr);
static atomic_int winners, stop;

// Two threads go on at the same moment.
static atomic_uint arrived;
static void together(void) {
  unsigned turn = ++arrived + 1;
  for (unsigned spins = 1; arrived < (turn & ~1u); spins++)
    if (spins % 4096 == 0) sched_yield();
}

// Both free the same address at once, or release the same handle; one of them can.
static void *freeing(void *number) {
  int me = (intptr_t)number;
  ptr random = 88172645463325252ull * (seed + 1), range = 0;
  if (cuCtxSetCurrent(context)) wrong++;
  if (!me && cuMemAddressReserve(&range, 8 << 20, 0, 0, 0)) wrong++;
  for (unsigned round = 0; round < rounds; round++) {
    size_t size = 0;
    if (!me) {
      ptr made_here = 0, of = next(&random);
      size_t pitch;
      res r = 0;
      struct allocation p = { .kind = 1, .handles = 1, .location = { 1, 0 } };
      release = cuMemFree_v2; other = (of & 16) ? free_in_stream : cuMemFree_v2;
      switch (of % 5) {
      case 0: r = cuMemAlloc_v2(&made_here, 1 + (of >> 8) % SMALL); break;
      case 1: r = cuMemAlloc_v2(&made_here, SMALL + 1 + (of >> 8) % (4 << 20)); break;
      case 2: r = cuMemAllocPitch_v2(&made_here, &pitch, 100 + (of >> 8) % 3000, 1 + (of >> 24) % 900, 4); break;
      case 3: r = cuMemAllocAsync(&made_here, 1 + (of >> 8) % (4 << 20), 0); break;
      case 4:
        r = cuMemCreate(&made_here, (1 + of % 3) << 21, &p, 0); release = other = cuMemRelease;
        // Half of them stay while they are mapped.
        if (!r && (of & 16)) { size = (1 + of % 3) << 21; if (cuMemMap(range, size, 0, made_here, 0)) wrong++; }
        break;
      }
      if (!made(r)) made_here = 0;
      shared = made_here;
    }
    together();
    if (shared && !(me ? other : release)(shared)) winners++;
    together();
    if (!me && shared && atomic_exchange(&winners, 0) != 1 && threads == 2) wrong++;
    if (size && cuMemUnmap(range, size)) wrong++;
  }
  stop = 1;
  return 0;
}

// Gets the addresses that the others free, meanwhile. They may free its own with them.
static void *reusing(void *unused) {
  ptr held[4] = { 0 };
  if (cuCtxSetCurrent(context)) wrong++;
  for (unsigned i = 0; !stop; i++) {
    if (held[i % 4]) cuMemFree_v2(held[i % 4]);
    held[i % 4] = 0;
    if (cuMemAlloc_v2(&held[i % 4], i & 1 ? 3000 : 3 << 20)) held[i % 4] = 0;
  }
  for (int i = 0; i < 4; i++)
    if (held[i]) cuMemFree_v2(held[i]);
  return unused;
}

static atomic_int off;
static void compare(void) {
  size_t free_bytes = 0, total = 0;
  if (cuMemGetInfo_v2(&free_bytes, &total)) wrong++;
  if (fake_cuda_given(0) != total - free_bytes) off++;
}

// Two free the same address at once, and a third one gets it at once for something that is no allocation.
static void *racing(void *number) {
  static atomic_int done;
  int me = (intptr_t)number;
  enum { SIZE = 4 << 20, PART = 2 << 20 };
  struct allocation p = { .kind = 1, .handles = 1, .location = { 1, 0 } };
  ptr before, behind, handle, place;
  if (cuCtxSetCurrent(context)) wrong++;
  // The address between two that stay is the only one that fits.
  if (!me && (cuMemAlloc_v2(&before, SIZE) || cuMemAlloc_v2(&place, SIZE) || cuMemAlloc_v2(&behind, SIZE) || cuMemFree_v2(place))) wrong++;
  if (me == 2 && cuMemCreate(&handle, PART, &p, 0)) wrong++;
  for (unsigned round = 0; round < rounds; round++) {
    pthread_barrier_wait(&barrier);
    if (!me) {
      done = 0;
      if (cuMemAlloc_v2(&place, SIZE)) wrong++;
      shared = place;
    }
    pthread_barrier_wait(&barrier);
    int is_mapped = 0;
    if (me < 2) { cuMemFree_v2(shared); done++; }
    while (me == 2 && done < 2 && !is_mapped) {
      if (cuMemAddressReserve(&place, SIZE, 0, 0, 0)) wrong++;
      if (place == shared) is_mapped = !cuMemMap(place, PART, 0, handle, 0);
      if (!is_mapped && cuMemAddressFree(place, SIZE)) wrong++;
    }
    pthread_barrier_wait(&barrier);
    if (is_mapped && (cuMemUnmap(place, PART) || cuMemAddressFree(place, SIZE))) wrong++;
    pthread_barrier_wait(&barrier);
    if (!me) compare();
  }
  if (me == 2 && cuMemRelease(handle)) wrong++;
  if (!me && (cuMemFree_v2(before) || cuMemFree_v2(behind))) wrong++;
  return 0;
}

// Two load an image each at once, and unload in this or the other order.
static void *pairing(void *number) {
  int me = (intptr_t)number;
  ptr random = 88172645463325252ull * (seed + 1) + 1442695040888963407ull * (me + 1);
  if (cuCtxSetCurrent(context)) wrong++;
  for (unsigned round = 0; round < rounds; round++) {
    struct slot slot = { 0 };
    together();
    load(&slot, next(&random));
    for (int turn = 0; turn < 2; turn++) {
      together();
      if (!me) compare();
      together();
      if ((round & 1) == (turn ^ me)) give(&slot);
    }
    together();
    if (!me) compare();
  }
  return 0;
}

// One frees what a kernel still uses, and waits at the driver longer than anybody looks; the other one makes contexts and loads images.
static void *waiting(void *number) {
  int me = (intptr_t)number;
  ptr random = 88172645463325252ull * (seed + 1);
  struct slot image = { 0 };
  void *kernel = 0, *made_here;
  if (cuCtxSetCurrent(context)) wrong++;
  if (!me) {
    load(&image, 0);
    if (cuModuleGetFunction(&kernel, image.handle, "busy_45ms")) wrong++;
  }
  for (unsigned round = 0; round < rounds; round++) {
    pthread_barrier_wait(&barrier);
    if (!me) {
      ptr used;
      if (cuMemAlloc_v2(&used, 8 << 20) || cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) || cuMemFree_v2(used)) wrong++;
    } else {
      for (int i = 0; i < 3; i++) {
        load(&image, next(&random));
        if (cuCtxCreate_v2(&made_here, 0, 0) || cuCtxDestroy_v2(made_here) || cuCtxSetCurrent(context)) wrong++;
        give(&image);
      }
      load(&image, next(&random));
    }
    quiet(me, "quiet");
    if (me) give(&image);
    quiet(me, "quiet");
  }
  give(&image);
  return 0;
}

// One loads an image slowly, each third one too large for the card, and unloads it; the other one makes and ends small arrays
// meanwhile, and at last all of them.
static atomic_int loading_now;
static void *overlapping(void *number) {
  int me = (intptr_t)number;
  ptr random = 88172645463325252ull * (seed + 1) + 1442695040888963407ull * (me + 1);
  struct slot image = { 0 }, slots[SLOTS] = { 0 };
  if (cuCtxSetCurrent(context)) wrong++;
  for (unsigned round = 0; round < rounds; round++) {
    if (!me) loading_now = 1;
    pthread_barrier_wait(&barrier);
    if (!me) {
      ptr file[8] = { 0x464c457f, 0, 0, 0, 0, round % 3 ? 1 + next(&random) % (6 << 20) : 1ull << 50 };
      if ((cuModuleLoadData(&image.handle, file) != 0) != !(round % 3)) wrong++;
      image.kind = round % 3 ? MODULE : NOTHING;
      loading_now = 0;
    }
    // All sizes of up to 1 MiB, so that blocks have room that is of no use.
    while (me && loading_now) {
      struct slot *slot = &slots[next(&random) % SLOTS];
      struct array3d line = { .width = 1 + next(&random) % SMALL, .format = 1, .channels = 1 };
      struct requirements r = { 0 };
      if (slot->kind) give(slot);
      else if (made(cuArray3DCreate_v2(&slot->handle, &line))) {
        slot->kind = ARRAY;
        if (cuArrayGetMemoryRequirements(&r, slot->handle, 0)) wrong++;
        slot->needed = r.size;
        count_array(slot, 1);
      }
    }
    quiet(me, "loaded");
    if (!me) give(&image);
    quiet(me, "unloaded");
    for (int i = 0; me && round % 8 == 7 && i < SLOTS; i++) give(&slots[i]);
    quiet(me, "round");
  }
  for (int i = 0; i < SLOTS; i++) give(&slots[i]);
  return 0;
}

// One takes away many mappings at once; the other one maps something of its own in the middle of them as soon as it can, and lets go
// of its handle.
enum { PARTS = 200, PART = 2 << 20 };
static void *mapping(void *number) {
  static ptr range, first;
  int me = (intptr_t)number;
  ptr second, place;
  struct allocation p = { .kind = 1, .handles = 1, .location = { 1, 0 } };
  if (cuCtxSetCurrent(context)) wrong++;
  if (!me && (cuMemAddressReserve(&range, PARTS * (size_t)PART, 0, 0, 0) || cuMemCreate(&first, PART, &p, 0))) wrong++;
  for (unsigned round = 0; round < rounds; round++) {
    for (ptr i = 0; !me && i < PARTS; i++)
      if (cuMemMap(range + i * PART, PART, 0, first, 0)) wrong++;
    if (me && cuMemCreate(&second, PART, &p, 0)) wrong++;
    together();
    place = range + (PARTS - 1 - round % (PARTS / 2)) * PART;
    if (!me && cuMemUnmap(range, PARTS * (size_t)PART)) wrong++;
    while (me && cuMemMap(place, PART, 0, second, 0)) sched_yield();
    if (me && cuMemRelease(second)) wrong++;
    together();
    if (!me) compare();
    together();
    if (me && cuMemUnmap(place, PART)) wrong++;
    together();
    if (!me) compare();
    together();
  }
  if (!me && cuMemRelease(first)) wrong++;
  return 0;
}

// One fills contexts and ends them; the other one gets their addresses in a context of its own, as soon as they are free.
static void *ending(void *number) {
  static ptr held[2000];
  static atomic_int is_over;
  int me = (intptr_t)number;
  void *made_here;
  ptr own[8];
  for (unsigned round = 0; round < rounds; round++) {
    if (me && cuCtxSetCurrent(context)) wrong++;
    together();
    if (!me) {
      if (cuCtxCreate_v2(&made_here, 0, 0)) wrong++;
      // Freed in the order in which they came: the first are free again when the last are still in the books.
      for (unsigned i = 0; i < sizeof held / sizeof *held; i++)
        if (cuMemAlloc_v2(&held[i], i % 2 ? 3000 : 4 << 20)) wrong++;
      if (cuCtxDestroy_v2(made_here)) wrong++;
      is_over = 1;
    }
    while (me && !is_over) {
      for (int i = 0; i < 8; i++)
        if (cuMemAlloc_v2(&own[i], i % 2 ? 200000 : 4 << 20)) wrong++;
      for (int i = 0; i < 8; i++)
        if (cuMemFree_v2(own[i])) wrong++;
    }
    together();
    if (!me) is_over = 0;
    if (me) compare();
    together();
  }
  return 0;
}

// Both take the same away; the first one, which comes first to the books, waits before the driver does it.
static void *doubling(void *number) {
  static ptr range;
  static void *green, *description;
  static unsigned char resource[144];
  int me = (intptr_t)number, is_green = seed == 2;
  ptr handle;
  struct allocation p = { .kind = 1, .handles = 1, .location = { 1, 0 } };
  if (cuCtxSetCurrent(context)) wrong++;
  if (!me && is_green && (cuDeviceGetDevResource(0, resource, 1) || cuDevResourceGenerateDesc(&description, resource, 1)
      || cuGreenCtxCreate(&green, description, 0, 0))) wrong++;
  if (!me && !is_green && (cuMemAddressReserve(&range, 8 << 20, 0, 0, 0) || cuMemCreate(&handle, 4 << 20, &p, 0)
      || cuMemMap(range, 4 << 20, 0, handle, 0) || cuMemMap(range + (4 << 20), 4 << 20, 0, handle, 0) || cuMemRelease(handle))) wrong++;
  if (!me) compare();
  together();
  if (me) usleep(100000);
  // The other mapping stays.
  res result = is_green ? cuGreenCtxDestroy(green) : cuMemUnmap(range, me ? 4 << 20 : 8 << 20);
  if ((result == 0) != me) wrong++;
  together();
  if (!me) compare();
  if (!me && !is_green && cuMemUnmap(range + (4 << 20), 4 << 20)) wrong++;
  if (!me) compare();
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  seed = atoi(argv[2]);
  rounds = atoi(argv[3]);
  threads = MOST_THREADS; phases = 10;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
  void *(*work)(void *) = mixing;
  if (!strcmp(argv[1], "modules")) { modules = 1; threads = 4; }
  if (!strcmp(argv[1], "contexts")) { contexts = modules = 1; threads = 4; }
  if (!strcmp(argv[1], "frees")) { work = freeing; threads = 2; }
  if (!strcmp(argv[1], "reused")) { work = freeing; threads = 3; }
  if (!strcmp(argv[1], "raced")) { work = racing; threads = 3; }
  if (!strcmp(argv[1], "pairs")) { work = pairing; threads = 2; }
  if (!strcmp(argv[1], "overlaps")) { work = overlapping; threads = 2; }
  if (!strcmp(argv[1], "maps")) { work = mapping; threads = 2; }
  if (!strcmp(argv[1], "waiting")) { work = waiting; threads = 2; }
  if (!strcmp(argv[1], "ended")) { work = ending; threads = 2; }
  if (!strcmp(argv[1], "doubled")) { work = doubling; threads = 2; }
  tell("begin");
  pthread_t t[MOST_THREADS];
  pthread_barrier_init(&barrier, 0, work == freeing ? 2 : threads);
  for (unsigned i = 0; i < threads; i++) pthread_create(&t[i], 0, i == 2 && work == freeing ? reusing : work, (void *)(intptr_t)i);
  for (unsigned i = 0; i < threads; i++) pthread_join(t[i], 0);
  if (cuCtxSynchronize()) wrong++;
  tell("last");
  printf("wrong %d\noff %d\nrefused %d\npeak %llu\n", wrong, off, refused, fake_cuda_peak(0));
  return 0;
}
