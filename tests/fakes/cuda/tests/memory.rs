//! What each family really takes of the card.

mod common;

use common::{Argument as _, CONTEXT, Cuda, MIB};

fn words<const N: usize>() -> [u64; N] {
    [0; N]
}

fn location(kind: u32, id: u32) -> u64 {
    u64::from(id) << 32 | u64::from(kind)
}

/// `CUmemPoolProps` or the start of `CUmemAllocationProp`: pinned memory on card 0.
fn on_card_zero() -> [u64; 11] {
    let mut words = words::<11>();
    (words[0], words[1]) = (1, location(1, 0));
    words
}

fn info(cuda: &Cuda) -> (u64, u64) {
    let (mut free, mut total) = (0_u64, 0_u64);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    (free, total)
}

#[test]
fn contexts_take_and_give_back() {
    let cuda = Cuda::load(&[]);
    // HK-08: no context, an error, and nothing written.
    let mut device = 77_i32;
    assert_eq!(call!(cuda.cuCtxGetDevice(&mut device)), 201);
    assert_eq!(device, 77);
    let mut p = 5_u64;
    assert_eq!(call!(cuda.cuMemAlloc_v2(&mut p, 100_u64)), 201);
    assert_eq!((p, cuda.given()), (5, 0));
    let (mut a, mut b) = (0_u64, 0_u64);
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut a, 0));
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut b, 0));
    assert_eq!((a, cuda.given()), (b, CONTEXT));
    let mut created = 0_u64;
    ok!(cuda.cuCtxCreate_v2(&mut created, 0, 0));
    assert_eq!(cuda.given(), 2 * CONTEXT);
    ok!(cuda.cuCtxGetDevice(&mut device));
    assert_eq!(device, 0);
    ok!(cuda.cuMemAlloc_v2(&mut p, 10 * MIB));
    ok!(cuda.cuCtxSetLimit(0, 2048_u64));
    assert_eq!(cuda.given(), 2 * CONTEXT + 10 * MIB + 1024 * 132 * 2048);
    assert_eq!(call!(cuda.cuCtxDestroy_v2(a)), 201, "a primary context is released, not destroyed");
    ok!(cuda.cuCtxDestroy_v2(created));
    assert_eq!(cuda.given(), CONTEXT, "its memory and its limits went with it");
    ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(cuda.given(), CONTEXT);
    ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!((cuda.given(), call!(cuda.cuDevicePrimaryCtxRelease_v2(0))), (0, 201));
}

#[test]
fn a_green_context_holds_the_primary_one() {
    let cuda = Cuda::load(&[]);
    let mut resource = words::<18>();
    ok!(cuda.cuDeviceGetDevResource(0, &mut resource, 1));
    assert_eq!(resource[12] & 0xFFFF_FFFF, 132);
    let (mut groups, mut count, mut rest) = ([words::<18>(); 2], 2_u32, words::<18>());
    ok!(cuda.cuDevSmResourceSplitByCount(&mut groups, &mut count, &mut resource, &mut rest, 0, 33));
    assert_eq!((count, groups[1][12] & 0xFFFF_FFFF, rest[12] & 0xFFFF_FFFF), (2, 40, 52));
    let (mut description, mut green) = (0_u64, 0_u64);
    ok!(cuda.cuDevResourceGenerateDesc(&mut description, &mut groups, 1));
    ok!(cuda.cuGreenCtxCreate(&mut green, description, 0, 1));
    assert_eq!(cuda.given(), CONTEXT + 32 * MIB);
    ok!(cuda.cuGreenCtxDestroy(green));
    assert_eq!(cuda.given(), 0);
    // What is made through one is the primary one's.
    let (mut primary, mut p) = (0_u64, 0_u64);
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut primary, 0));
    ok!(cuda.cuGreenCtxCreate(&mut green, description, 0, 1));
    ok!(cuda.cuCtxSetCurrent(green));
    ok!(cuda.cuMemAlloc_v2(&mut p, 2 * MIB));
    ok!(cuda.cuCtxSetLimit(2, 16 * MIB));
    ok!(cuda.cuGreenCtxDestroy(green));
    assert_eq!(cuda.given(), CONTEXT + 10 * MIB);
    ok!(cuda.cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(cuda.given(), 0);
}

#[test]
fn plain_memory_comes_in_blocks() {
    let cuda = Cuda::ready(&[]);
    let mut p = [0_u64; 6];
    ok!(cuda.cuMemAlloc_v2(&mut p[0], 1));
    assert_eq!(cuda.beyond(), 2 * MIB, "the first byte takes a block");
    ok!(cuda.cuMemAlloc_v2(&mut p[1], MIB));
    assert_eq!(cuda.beyond(), 2 * MIB, "which others share");
    assert_eq!((p[0] % 512, p[1] % 512), (0, 0));
    ok!(cuda.cuMemAlloc_v2(&mut p[2], MIB));
    assert_eq!(cuda.beyond(), 4 * MIB, "until it is full");
    ok!(cuda.cuMemAlloc_v2(&mut p[3], MIB + 1));
    assert_eq!(cuda.beyond(), 6 * MIB, "larger ones have blocks of their own");
    let (mut base, mut size) = (0_u64, 0_u64);
    ok!(cuda.cuMemGetAddressRange_v2(&mut base, &mut size, p[1] + 1000));
    assert_eq!((base, size), (p[1], MIB));
    for pointer in &p[..4] {
        ok!(cuda.cuMemFree_v2(*pointer));
    }
    assert_eq!(cuda.beyond(), 0);
    assert_eq!(call!(cuda.cuMemFree_v2(p[0])), 1, "double free");
    assert_eq!(call!(cuda.cuMemFree_v2(0x1234_u64)), 1, "never given");
    ok!(cuda.cuMemFree_v2(0));
    assert_eq!(call!(cuda.cuMemAlloc_v2(&mut p[4], 0)), 1);
}

#[test]
fn the_card_is_full_at_the_exact_edge() {
    let cuda = Cuda::ready(&[("FAKE_CUDA_CARDS", "a30")]);
    let (free, total) = info(&cuda);
    assert_eq!((free, total), (total - CONTEXT, (24576 - 310) * MIB));
    let mut p = [7_u64; 2];
    ok!(cuda.cuMemAlloc_v2(&mut p[0], free - 2 * MIB));
    assert_eq!(call!(cuda.cuMemAlloc_v2(&mut p[1], 2 * MIB + 1)), 2);
    assert_eq!(p[1], 7, "untouched");
    ok!(cuda.cuMemAlloc_v2(&mut p[1], 2 * MIB));
    assert_eq!(info(&cuda).0, 0);
    let mut q = 7_u64;
    for (case, code) in [
        ("plain", call!(cuda.cuMemAlloc_v2(&mut q, 1))),
        ("managed", call!(cuda.cuMemAllocManaged(&mut q, 1, 1))),
        ("async", call!(cuda.cuMemAllocAsync(&mut q, 1, 0))),
        ("async of the thread", call!(cuda.cuMemAllocAsync_ptsz(&mut q, 1, 0))),
        ("physical", call!(cuda.cuMemCreate(&mut q, 2 * MIB, &mut on_card_zero(), 0))),
        ("array", call!(cuda.cuArrayCreate_v2(&mut q, &mut [64_u64, 64, 1 << 32 | 0x20]))),
        ("context", call!(cuda.cuCtxCreate_v2(&mut q, 0, 0))),
        ("module", call!(cuda.cuModuleLoadData(&mut q, c".version 8.0"))),
    ] {
        assert_eq!((code, q), (2, 7), "{case}");
    }
    ok!(cuda.cuMemFree_v2(p[1]));
    ok!(cuda.cuMemAlloc_v2(&mut q, 1));
}

#[test]
fn pitch_is_512_and_managed_and_host_are_what_they_are() {
    let cuda = Cuda::ready(&[]);
    let (mut p, mut pitch) = (0_u64, 0_u64);
    ok!(cuda.cuMemAllocPitch_v2(&mut p, &mut pitch, 513, 4096, 4));
    assert_eq!((pitch, cuda.beyond()), (1024, 4 * MIB));
    assert_eq!(call!(cuda.cuMemAllocPitch_v2(&mut p, &mut pitch, 513, 4096, 5)), 1);
    ok!(cuda.cuMemFree_v2(p));
    ok!(cuda.cuMemAllocManaged(&mut p, 3 * MIB, 1));
    assert_eq!(cuda.beyond(), 4 * MIB);
    ok!(cuda.cuMemPrefetchAsync(p, 3 * MIB, 0, 0));
    ok!(cuda.cuMemPrefetchAsync_v2(p, 3 * MIB, location(2, 0), 0, 0));
    let mut managed = 0_i32;
    ok!(cuda.cuPointerGetAttribute(&mut managed, 8, p));
    assert_eq!(managed, 1);
    ok!(cuda.cuMemFree_v2(p));
    let mut host = 0_u64;
    ok!(cuda.cuMemAllocHost_v2(&mut host, 64 * MIB));
    ok!(cuda.cuMemHostGetDevicePointer_v2(&mut p, host, 0));
    assert_eq!((p, cuda.beyond()), (host, 0));
    ok!(cuda.cuMemFreeHost(host));
    let mut own = vec![0_u8; 8192];
    let start = own.as_mut_ptr().expose_provenance() as u64;
    ok!(cuda.cuMemHostRegister_v2(start, 8192, 0));
    assert_eq!(call!(cuda.cuMemHostRegister_v2(start + 10, 5, 0)), 712);
    ok!(cuda.cuMemHostUnregister(start));
    assert_eq!((call!(cuda.cuMemHostUnregister(start)), cuda.beyond()), (713, 0));
}

#[test]
fn copies_copy() {
    let cuda = Cuda::ready(&[]);
    let (mut p, mut q) = (0_u64, 0_u64);
    ok!(cuda.cuMemAlloc_v2(&mut p, 4096));
    ok!(cuda.cuMemAlloc_v2(&mut q, 4096));
    let (mut source, mut target) = ([9_u8; 4096], [0_u8; 4096]);
    ok!(cuda.cuMemcpyHtoD_v2(p, &mut source, 4096));
    ok!(cuda.cuMemcpyDtoDAsync_v2(q, p, 4096, 0));
    ok!(cuda.cuMemsetD32_v2(q, 0x0403_0201_u32, 1));
    ok!(cuda.cuMemcpyDtoH_v2(&mut target, q, 4096));
    assert_eq!((&target[..5], target[4095]), (&[1, 2, 3, 4, 9][..], 9));
    assert_eq!(call!(cuda.cuMemcpyHtoD_v2(p + 1, &mut source, 4096)), 1, "past the end");
    assert_eq!(call!(cuda.cuMemcpyHtoD_v2(0x10_u64, &mut source, 1)), 1, "nobody's");
}

#[test]
fn arrays_take_their_tiles_and_sparse_ones_nothing() {
    let cuda = Cuda::ready(&[]);
    let mut array = 0_u64;
    // 2048 x 2048, two channels of 32 bits.
    ok!(cuda.cuArrayCreate_v2(&mut array, &mut [2048_u64, 2048, 2 << 32 | 0x03]));
    assert_eq!(cuda.beyond(), 32 * MIB);
    ok!(cuda.cuArrayDestroy(array));
    ok!(cuda.cuMipmappedArrayCreate(&mut array, &mut [2048_u64, 2048, 0, 2 << 32 | 0x03, 0], 3));
    assert_eq!(cuda.beyond(), (32 + 8 + 2) * MIB);
    let mut level = 0_u64;
    ok!(cuda.cuMipmappedArrayGetLevel(&mut level, array, 2));
    assert_eq!(call!(cuda.cuArrayDestroy(level)), 400, "a level belongs to its mipmap");
    ok!(cuda.cuMipmappedArrayDestroy(array));
    assert_eq!(cuda.beyond(), 0);
    ok!(cuda.cuArray3DCreate_v2(&mut array, &mut [2048_u64, 2048, 0, 2 << 32 | 0x03, 0x40]));
    assert_eq!(cuda.beyond(), 0);
    ok!(cuda.cuArrayDestroy(array));
}

/// Pages of arrays are of another kind than others, and code has a range of its own.
#[test]
fn small_things_share_blocks_with_their_like_alone() {
    let cuda = Cuda::ready(&[]);
    let block = 2 * MIB;
    let (mut p, mut array, mut module) = (0_u64, [0_u64; 2], [0_u64; 2]);
    let image = std::ffi::CString::new([b' '; 1000]).unwrap();
    ok!(cuda.cuMemAlloc_v2(&mut p, 512));
    assert_eq!(cuda.given(), CONTEXT + block);
    for i in 0..2 {
        // 16 by 8 elements of 32 bits.
        ok!(cuda.cuArrayCreate_v2(&mut array[i], &mut [16_u64, 8, 1 << 32 | 0x20]));
        ok!(cuda.cuModuleLoadData(&mut module[i], image.as_c_str()));
        assert_eq!(cuda.given(), CONTEXT + 3 * block);
    }
    ok!(cuda.cuMemFree_v2(p));
    assert_eq!(cuda.given(), CONTEXT + 2 * block);
    for i in 0..2 {
        assert_eq!(cuda.given(), CONTEXT + 2 * block);
        ok!(cuda.cuArrayDestroy(array[i]));
        ok!(cuda.cuModuleUnload(module[i]));
    }
    assert_eq!(cuda.given(), CONTEXT);
}

fn pool_number(cuda: &Cuda, pool: u64, attribute: u32) -> u64 {
    let mut value = 0_u64;
    ok!(cuda.cuMemPoolGetAttribute(pool, attribute, &mut value));
    value
}

#[test]
fn pools_reserve_in_chunks_and_give_back_at_synchronisation() {
    let cuda = Cuda::ready(&[]);
    let (mut pool, mut p, mut q) = (0_u64, 0_u64, 0_u64);
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    ok!(cuda.cuMemAllocAsync(&mut p, 100, 0));
    ok!(cuda.cuMemAllocAsync_ptsz(&mut q, 40 * MIB, 0));
    assert_eq!((pool_number(&cuda, pool, 5), pool_number(&cuda, pool, 7)), (64 * MIB, 40 * MIB + 512));
    assert_eq!(cuda.beyond(), 64 * MIB);
    ok!(cuda.cuMemFreeAsync(q, 0));
    assert_eq!(cuda.beyond(), 64 * MIB, "kept until something synchronises");
    ok!(cuda.cuStreamSynchronize(0));
    assert_eq!(cuda.beyond(), 32 * MIB);
    let mut threshold = 1024 * MIB;
    ok!(cuda.cuMemPoolSetAttribute(pool, 4, &mut threshold));
    ok!(cuda.cuMemAllocAsync(&mut q, 500 * MIB, 0));
    ok!(cuda.cuMemFree_v2(q));
    ok!(cuda.cuCtxSynchronize());
    assert_eq!(cuda.beyond(), 512 * MIB, "below the threshold it stays");
    ok!(cuda.cuMemPoolTrimTo(pool, 100 * MIB));
    assert_eq!(cuda.beyond(), 128 * MIB);
    ok!(cuda.cuMemFreeAsync(p, 0));
    assert_eq!(call!(cuda.cuMemFreeAsync(p, 0)), 1, "double free");
    assert_eq!((pool_number(&cuda, pool, 6), pool_number(&cuda, pool, 8)), (512 * MIB, 500 * MIB + 512));
    ok!(cuda.cuMemPoolTrimTo(pool, 0));
    assert_eq!(cuda.beyond(), 0);
    assert_eq!(call!(cuda.cuMemPoolDestroy(pool)), 1, "the default pool stays");
}

#[test]
fn a_destroyed_pool_goes_with_its_last_allocation() {
    let cuda = Cuda::ready(&[]);
    let (mut pool, mut p) = (0_u64, 0_u64);
    let mut props = on_card_zero();
    props[3] = 64 * MIB;
    ok!(cuda.cuMemPoolCreate(&mut pool, &mut props));
    assert_eq!(call!(cuda.cuMemAllocFromPoolAsync(&mut p, 65 * MIB, pool, 0)), 2, "over its most");
    ok!(cuda.cuMemAllocFromPoolAsync(&mut p, 33 * MIB, pool, 0));
    ok!(cuda.cuMemPoolDestroy(pool));
    assert_eq!(cuda.beyond(), 64 * MIB);
    ok!(cuda.cuMemFreeAsync(p, 0));
    assert_eq!(cuda.beyond(), 0);
    assert_eq!(call!(cuda.cuMemAllocFromPoolAsync(&mut p, 1, pool, 0)), 1);
}

#[test]
fn a_handle_lives_while_it_is_held_or_mapped() {
    let cuda = Cuda::ready(&[]);
    let (mut handle, mut again, mut range) = (0_u64, 0_u64, 0_u64);
    assert_eq!(
        call!(cuda.cuMemCreate(&mut handle, 3 * MIB, &mut on_card_zero(), 0)),
        1,
        "no multiple of 2 MiB"
    );
    ok!(cuda.cuMemCreate(&mut handle, 6 * MIB, &mut on_card_zero(), 0));
    assert_eq!(cuda.beyond(), 6 * MIB);
    ok!(cuda.cuMemAddressReserve(&mut range, 16 * MIB, 0, 0, 0));
    ok!(cuda.cuMemMap(range + 2 * MIB, 6 * MIB, 0, handle, 0));
    assert_eq!(call!(cuda.cuMemMap(range, 6 * MIB, 0, handle, 0)), 1, "there is a mapping already");
    ok!(cuda.cuMemRetainAllocationHandle(&mut again, range + 3 * MIB));
    assert_eq!(again, handle);
    ok!(cuda.cuMemRelease(handle));
    ok!(cuda.cuMemRelease(handle));
    assert_eq!((cuda.beyond(), call!(cuda.cuMemRelease(handle))), (6 * MIB, 1));
    assert_eq!(call!(cuda.cuMemAddressFree(range, 16 * MIB)), 1, "still mapped");
    ok!(cuda.cuMemUnmap(range + 2 * MIB, 6 * MIB));
    assert_eq!(cuda.beyond(), 0);
    ok!(cuda.cuMemAddressFree(range, 16 * MIB));
    // The card of the location counts, not that of the context.
    let mut props = on_card_zero();
    props[1] = location(1, 1);
    ok!(cuda.cuMemCreate(&mut handle, 2 * MIB, &mut props, 0));
    assert_eq!((cuda.beyond(), cuda.word("fake_cuda_given", &[1])), (0, 2 * MIB));
    props[1] = location(2, 0);
    ok!(cuda.cuMemCreate(&mut again, 2 * MIB, &mut props, 0));
    assert_eq!((cuda.beyond(), cuda.word("fake_cuda_given", &[1])), (0, 2 * MIB), "the host's memory");
}

#[test]
fn what_others_own_is_not_given_twice() {
    let cuda = Cuda::ready(&[]);
    let (mut handle, mut imported, mut descriptor) = (0_u64, 0_u64, -1_i32);
    ok!(cuda.cuMemCreate(&mut handle, 4 * MIB, &mut on_card_zero(), 0));
    ok!(cuda.cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
    ok!(cuda.cuMemImportFromShareableHandle(&mut imported, descriptor, 1));
    assert_eq!(cuda.beyond(), 4 * MIB);
    ok!(cuda.cuMemRelease(imported));
    assert_eq!(cuda.beyond(), 4 * MIB);
    ok!(cuda.cuMemRelease(handle));
    assert_eq!(cuda.beyond(), 0);
    let (mut memory, mut buffer) = (0_u64, 0_u64);
    let mut description = [0_u64; 13];
    (description[0], description[3]) = (1, 8 * MIB);
    ok!(cuda.cuImportExternalMemory(&mut memory, &mut description));
    ok!(cuda.cuExternalMemoryGetMappedBuffer(
        &mut buffer,
        memory,
        &mut [0_u64, 8 * MIB, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    ));
    assert_eq!(cuda.beyond(), 0);
    ok!(cuda.cuMemFree_v2(buffer));
    ok!(cuda.cuDestroyExternalMemory(memory));
    let (mut p, mut ipc) = (0_u64, [0_u64; 8]);
    ok!(cuda.cuMemAlloc_v2(&mut p, 4 * MIB));
    ok!(cuda.cuIpcGetMemHandle(&mut ipc, p));
    let (mut pool, mut q) = (0_u64, 0_u64);
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    ok!(cuda.cuMemAllocAsync(&mut q, 1, 0));
    assert_eq!(call!(cuda.cuIpcGetMemHandle(&mut ipc, q)), 1, "pool memory has no such handle");
    let (mut multicast, mut props) = (0_u64, [1_u64, 2 * MIB, 1, 0]);
    let before = cuda.beyond();
    ok!(cuda.cuMulticastCreate(&mut multicast, &mut props));
    assert_eq!(cuda.beyond(), before);
}

fn graph_numbers(cuda: &Cuda) -> [u64; 4] {
    [0_u32, 1, 2, 3].map(|attribute| {
        let mut value = 0_u64;
        ok!(cuda.cuDeviceGetGraphMemAttribute(0, attribute, &mut value));
        value
    })
}

/// Adds an allocation to a graph; answers its address.
fn add_allocation(cuda: &Cuda, graph: u64, bytes: u64) -> u64 {
    let mut node = 0_u64;
    let mut params = [0_u64; 15];
    params[..11].copy_from_slice(&on_card_zero());
    params[13] = bytes;
    ok!(cuda.cuGraphAddMemAllocNode(&mut node, graph, 0, 0, &mut params));
    params[14]
}

/// A graph of allocations that are freed at once, ready to be launched.
fn passing(cuda: &Cuda, sizes: &[u64]) -> (u64, Vec<u64>) {
    let (mut graph, mut node, mut exec) = (0_u64, 0_u64, 0_u64);
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    let mut addresses = Vec::new();
    for &bytes in sizes {
        let address = add_allocation(cuda, graph, bytes);
        ok!(cuda.cuGraphAddMemFreeNode(&mut node, graph, 0, 0, address));
        addresses.push(address);
    }
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    (exec, addresses)
}

#[test]
fn graph_memory_comes_with_the_launch_and_stays_until_trimmed() {
    let cuda = Cuda::ready(&[]);
    let (mut graph, mut exec) = (0_u64, 0_u64);
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    let address = add_allocation(&cuda, graph, 3 * MIB);
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    assert_eq!((cuda.beyond(), graph_numbers(&cuda)), (0, [0; 4]), "a graph alone takes nothing");
    ok!(cuda.cuGraphLaunch(exec, 0));
    assert_eq!((cuda.beyond(), graph_numbers(&cuda)), (4 * MIB, [4 * MIB; 4]));
    assert_eq!(call!(cuda.cuGraphLaunch(exec, 0)), 1, "its memory is still in use");
    ok!(cuda.cuDeviceGraphMemTrim(0));
    assert_eq!(cuda.beyond(), 4 * MIB, "what is in use stays");
    ok!(cuda.cuMemFree_v2(address));
    assert_eq!((cuda.beyond(), graph_numbers(&cuda)[0]), (4 * MIB, 4 * MIB), "freed, yet mapped");
    ok!(cuda.cuGraphLaunch(exec, 0));
    ok!(cuda.cuMemFreeAsync(address, 0));
    ok!(cuda.cuDeviceGraphMemTrim(0));
    assert_eq!((cuda.beyond(), graph_numbers(&cuda)[0]), (0, 0));
}

#[test]
fn graphs_share_what_they_do_not_use_at_the_same_time() {
    let cuda = Cuda::ready(&[]);
    let (exec, addresses) = passing(&cuda, &[20 * MIB, 8 * MIB, 30 * MIB, 20 * MIB]);
    let distinct: std::collections::BTreeSet<_> = addresses.iter().collect();
    assert_eq!(distinct.len(), 2, "30 MiB did not fit where 20 had been: {addresses:x?}");
    ok!(cuda.cuGraphLaunch(exec, 0));
    assert_eq!(cuda.beyond(), 50 * MIB);
    let (other, _) = passing(&cuda, &[60 * MIB]);
    ok!(cuda.cuGraphLaunch(other, 0));
    assert_eq!(cuda.beyond(), 60 * MIB);
    for exec in [exec, other] {
        ok!(cuda.cuGraphExecDestroy(exec));
    }
    assert_eq!((cuda.beyond(), graph_numbers(&cuda)[0]), (60 * MIB, 0), "mapped by none");
    ok!(cuda.cuDeviceGraphMemTrim(0));
    assert_eq!(cuda.beyond(), 0);
}

#[test]
fn injected_errors_end_after_their_calls() {
    let cuda = Cuda::ready(&[]);
    let mut p = 3_u64;
    assert_eq!(cuda.call("fake_cuda_fail", &[c"cuMemAlloc_v2".word(), 700, 2]), 0);
    assert_eq!(cuda.call("fake_cuda_fail", &[c"cuNope".word(), 700, 2]), 1);
    assert_eq!([call!(cuda.cuMemAlloc_v2(&mut p, 1)), call!(cuda.cuMemAlloc_v2(&mut p, 1))], [700, 700]);
    assert_eq!((p, cuda.beyond()), (3, 0));
    ok!(cuda.cuMemAlloc_v2(&mut p, 1));
    assert_eq!(cuda.word("fake_cuda_calls", &[c"cuMemAlloc_v2".word()]), 3);
}

/// Many live allocations, freed in any order, leave nothing; the count is what the hook's benchmarks go up to.
#[test]
fn a_hundred_thousand_allocations_leave_nothing() {
    let cuda = Cuda::ready(&[]);
    let mut live = vec![0_u64; 100_000];
    for (place, p) in live.iter_mut().enumerate() {
        ok!(cuda.cuMemAlloc_v2(p, 512 + (place % 5) * 4096));
    }
    let distinct: std::collections::BTreeSet<_> = live.iter().collect();
    assert_eq!(distinct.len(), live.len());
    for place in 0..live.len() {
        ok!(cuda.cuMemFree_v2(live[(place * 7919) % live.len()]));
    }
    assert_eq!((cuda.beyond(), cuda.word("fake_cuda_live_allocations", &[])), (0, 0));
}
