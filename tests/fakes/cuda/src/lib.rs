//! A simulated `libcuda.so.1`: NVIDIA's driver for everything that takes memory or time of a card.
//!
//! Programs load it under the driver's name and meet the driver's symbols, structs, codes and rules of CUDA 12.x and 13.x. It counts what it
//! really gave, so that tests compare that truth with the accounting of whoever stands before it.
//!
//! # Entry points
//! `symbols.rs` and `unsupported.rs` are the one list: module, symbol, name, version, default stream. It makes the exports (every name that `cuda.h`, `cudaGL.h`,
//! `cudaEGL.h`, `cudaVDPAU.h` and `cudaProfiler.h` of 12.9.79, 13.0.96 and 13.5.37 declare, with `_v2`, `_v3`, `_ptds`, `_ptsz`) and answers
//! `cuGetProcAddress`: the newest row of the name that is no newer than asked and than the driver, of the thread's own default stream
//! where flag 2 asks for it and there is one. What is not found is `CUDA_SUCCESS`, a null pointer, and the status 1 (no such symbol)
//! or 2 (version not sufficient), in the words of the header. Rows of `unsupported.rs` answer `CUDA_ERROR_NOT_SUPPORTED`: graphics
//! interop, texture and tensor map objects, linking, checkpoints, stream memory operations, and the 32-bit forms of before CUDA 3.2.
//! In a forked child every call answers `CUDA_ERROR_NOT_INITIALIZED`, as the driver does.
//!
//! # Cards
//! `MULLION_FAKE_STATE` names the node's state file, whose cards are shared with every other process and with the simulated NVML through the
//! live file beside it (see `fake_state::live`; both have to be writable). Without it the cards are those of `FAKE_CUDA_CARDS` (a profile
//! such as `h100x2`, the default) and this process's alone. A card has its memory without the driver's reserve (81,008 MiB for an
//! H100 80GB), less what scripted processes of the state file hold. `CUDA_VISIBLE_DEVICES` is honoured (indices, prefixes of uuids).
//!
//! # What takes memory
//! | what | bytes of the card |
//! | --- | --- |
//! | context, primary or created | `FAKE_CUDA_CONTEXT_MIB` (400) from creation to destruction; limits beyond their defaults: stack × SMs × 2,048 threads, printf and malloc heap as they are, in 2 MiB |
//! | green context | `FAKE_CUDA_GREEN_CONTEXT_MIB` (32), and it holds the primary context, which has what is allocated or loaded through it |
//! | `cuMemAlloc`, pitched, managed | blocks of 2 MiB: up to 1 MiB in pieces of 512 bytes of a block shared with its like, above that whole blocks; rows are rounded up to 512; managed memory counts in full from the start |
//! | host memory, allocated or registered | nothing |
//! | array, mipmapped array | tiles of 64 bytes × 8 rows (lines of 512 bytes), levels added up, then as `cuMemAlloc`; sparse and deferred ones nothing |
//! | `cuMemAllocAsync`, pools | the pool's reserve, in 32 MiB; given back beyond the release threshold at synchronisation, trim, destruction |
//! | `cuMemCreate` | its size, a multiple of 2 MiB, on the card of its location, until it is neither held nor mapped |
//! | memory allocation nodes | the card's graph pool, in 2 MiB, at launch or upload, shared by graphs that do not run at the same time (see `graph_memory`); given back by `cuDeviceGraphMemTrim` |
//! | module, library | the image's size, as `cuMemAlloc` |
//! | IPC, imported handles and pools, external memory, multicast objects | nothing: it is their owner's |
//!
//! A full card answers `CUDA_ERROR_OUT_OF_MEMORY` and leaves the out argument alone. Bytes of a process that died stay on the card for
//! `FAKE_CUDA_RELEASE_DELAY_MS` (0) after somebody noticed.
//!
//! # What takes time
//! A card runs the kernels of a process one after the other, and shares its time equally among processes with work (see
//! `fake_state::live::work`). A kernel's time goes by its name or by its waves (see `module`); `FAKE_CUDA_CLOCK=simulated` puts a clock in the
//! place of the real one that waiting moves on. Copies and fills happen at the call and take no time.
//!
//! # For tests
//! | export | answer |
//! | --- | --- |
//! | `u64 fake_cuda_given(int device)` | bytes that the card gave this process |
//! | `u64 fake_cuda_given_on_card(int device)` | the same over all processes, the dead included until they are released |
//! | `u64 fake_cuda_peak(int device)` | the most that the card ever gave at once |
//! | `u64 fake_cuda_busy_ns(int device)`, `u64 fake_cuda_submitted_ns(int device)` | work done on the card by all, handed in by this process |
//! | `u64 fake_cuda_live_allocations(void)` | address ranges in use here |
//! | `u64 fake_cuda_calls(const char *symbol)` | calls of a symbol |
//! | `int fake_cuda_fail(const char *symbol, unsigned code, unsigned calls)` | has the next calls of a symbol fail |
//! | `int fake_cuda_set_duration(const char *kernel, u64 ns)` | sets a kernel's time |
//! | `u64 fake_cuda_advance_clock(u64 ns)` | moves the simulated clock |
//!
//! | variable | effect |
//! | --- | --- |
//! | `FAKE_CUDA_VERSION` | CUDA version, 12090 or the state file's |
//! | `FAKE_CUDA_WAVE_NS` | time of a wave of a kernel whose name says nothing, 2,000 |
//! | `FAKE_CUDA_SLOW=SYMBOL:N:US` | the N-th call of a symbol takes so many µs before it does anything, as with a full queue |
//! | `FAKE_CUDA_LATE=SYMBOL:US,…` | a symbol's calls answer so many µs after they have done all |
//! | `FAKE_CUDA_LOAD_US` | µs before and after an image's memory is given, in which other threads can call, 0 |
//! | `FAKE_CUDA_STUB=1` | constant work for `cuMemAlloc_v2`, `cuMemFree_v2`, `cuMemGetInfo_v2`, launches and graph launches, no counting: what benchmarks subtract |
//! | `FAKE_CUDA_RECURSE=1` | `cuInit` calls entry points through the program's global scope first (HK-03) |
//! | `FAKE_CUDA_PROC_LOG` | file to which every request of `cuGetProcAddress` is added: name, version, flags, symbol or `-` |
//! | `FAKE_CUDA_TRACE=1` | every call and its answer on stderr, from `cuInit` on |
//! | `MULLION_FAKE_DEVICE_NODES=1` | only cards with a node `/dev/nvidia<minor>` are there, as in a container |
//!
//! Not simulated: the content of arrays, stream order of copies and of pool memory, occupancy of a card by several small
//! kernels at once, MIG devices, and the check by which the CUDA runtime makes sure that the driver is NVIDIA's (see `export_table`).

mod abi;
mod array;
mod capture;
mod cards;
mod context;
mod device;
mod driver;
mod export_table;
mod external;
mod gate;
mod graph;
mod graph_memory;
mod graph_node;
mod green;
mod init;
mod launch;
mod memory;
mod module;
mod objects;
mod pool;
mod recursion;
mod share;
mod space;
mod stream;
mod stub;
mod table;
mod transfer;
mod truth;
mod vmm;
