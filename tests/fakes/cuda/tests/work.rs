//! Time: launches, streams, events, graphs and capture, on a simulated clock.

mod common;

use common::{Argument as _, Cuda, MIB};

const SIMULATED: &[(&str, &str)] = &[("FAKE_CUDA_CLOCK", "simulated")];
const MS: u64 = 1_000_000;

fn submitted(cuda: &Cuda) -> u64 {
    cuda.word("fake_cuda_submitted_ns", &[0])
}

#[test]
fn kernels_run_one_after_the_other_and_events_tell_when() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"busy_5ms");
    let (mut start, mut end) = (0_u64, 0_u64);
    ok!(cuda.cuEventCreate(&mut start, 0));
    ok!(cuda.cuEventCreate(&mut end, 0));
    ok!(cuda.cuEventRecord(start, 0));
    for _ in 0..3 {
        assert_eq!(cuda.launch(kernel, 0), 0);
    }
    ok!(cuda.cuEventRecord(end, 0));
    let mut ms = 0_f32;
    assert_eq!(call!(cuda.cuEventQuery(end)), 600);
    assert_eq!(call!(cuda.cuEventElapsedTime(&mut ms, start, end)), 600);
    cuda.word("fake_cuda_advance_clock", &[14 * MS]);
    assert_eq!(call!(cuda.cuStreamQuery(0)), 600);
    cuda.word("fake_cuda_advance_clock", &[7 * MS]);
    ok!(cuda.cuStreamQuery(0));
    ok!(cuda.cuEventElapsedTime(&mut ms, start, end));
    assert!((ms - 15.0).abs() < 1e-3, "{ms}");
    assert_eq!(cuda.word("fake_cuda_busy_ns", &[0]), 15 * MS);
}

/// The card keeps a few stretches of work; the time of an event is right however often it is looked at meanwhile, and
/// however much is launched after it.
#[test]
fn events_in_several_streams_tell_when_although_they_are_asked_late() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"busy_5ms");
    let mut streams = [0_u64; 4];
    for stream in &mut streams {
        ok!(cuda.cuStreamCreate(stream, 1));
    }
    let mut events = [[0_u64; 2]; 100];
    for (i, pair) in events.iter_mut().enumerate() {
        let stream = streams[i % 4];
        for event in &mut *pair {
            ok!(cuda.cuEventCreate(event, 0));
        }
        ok!(cuda.cuEventRecord(pair[0], stream));
        assert_eq!(cuda.launch(kernel, stream), 0);
        ok!(cuda.cuEventRecord(pair[1], stream));
        if i >= 50 {
            // One by one from here.
            ok!(cuda.cuStreamSynchronize(stream));
            cuda.word("fake_cuda_advance_clock", &[MS]);
        } else {
            for _ in 0..3 {
                cuda.word("fake_cuda_advance_clock", &[MS / 10]);
                let _ = call!(cuda.cuEventQuery(pair[1]));
            }
        }
    }
    for (i, [start, end]) in events.into_iter().enumerate() {
        let mut ms = 0_f32;
        ok!(cuda.cuEventElapsedTime(&mut ms, start, end));
        // From the end of the kernel before it in its stream, or from the moment of the record, to its own end.
        let want = match i {
            0..4 => {
                5.0 * f64::from(u32::try_from(i + 1).unwrap_or(0))
                    - 0.3 * f64::from(u32::try_from(i).unwrap_or(0))
            }
            4..=49 => 20.0,
            51..=99 => 5.0,
            _ => continue,
        };
        assert!((f64::from(ms) - want).abs() < 0.01, "{i}: {ms} instead of {want}");
    }
}

/// Work that is handed in after a pause begins then, although nobody asked meanwhile whether what was before it had ended.
#[test]
fn work_does_not_begin_before_it_is_handed_in() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"busy_5ms");
    let (mut other, mut stream, mut events) = (0_u64, 0_u64, [0_u64; 2]);
    ok!(cuda.cuStreamCreate(&mut other, 1));
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    for event in &mut events {
        ok!(cuda.cuEventCreate(event, 0));
    }
    assert_eq!(cuda.launch(kernel, other), 0);
    cuda.word("fake_cuda_advance_clock", &[30 * MS]);
    ok!(cuda.cuEventRecord(events[0], stream));
    assert_eq!(cuda.launch(kernel, stream), 0);
    ok!(cuda.cuEventRecord(events[1], stream));
    cuda.word("fake_cuda_advance_clock", &[4 * MS]);
    assert_eq!(call!(cuda.cuEventQuery(events[1])), 600);
    ok!(cuda.cuCtxSynchronize());
    let mut ms = 0_f32;
    ok!(cuda.cuEventElapsedTime(&mut ms, events[0], events[1]));
    assert!((ms - 5.0).abs() < 1e-3, "{ms}");
}

#[test]
fn waiting_moves_the_simulated_clock() {
    let cuda = Cuda::ready(SIMULATED);
    let before = cuda.word("fake_cuda_advance_clock", &[0]);
    let kernel = cuda.kernel(c"busy_2s");
    assert_eq!(cuda.launch(kernel, 0), 0);
    ok!(cuda.cuCtxSynchronize());
    let passed = cuda.word("fake_cuda_advance_clock", &[0]) - before;
    assert!((2_000 * MS..2_001 * MS).contains(&passed), "{passed}");
}

#[test]
fn a_kernel_is_as_long_as_its_waves() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"wave_10us");
    // An H100 holds 132 x 2,048 threads: 264 blocks of 1,024.
    for (grid, block, waves) in [(1, 32, 1), (264, 1024, 1), (265, 1024, 2), (2640, 1024, 10)] {
        let before = submitted(&cuda);
        assert_eq!(cuda.call("cuLaunchKernel", &[kernel, grid, 1, 1, block, 1, 1, 0, 0, 0, 0]), 0);
        assert_eq!(submitted(&cuda) - before, waves * 10_000, "{grid} x {block}");
    }
    assert_eq!(cuda.call("cuLaunchKernel", &[kernel, 0, 1, 1, 32, 1, 1, 0, 0, 0, 0]), 1);
    assert_eq!(cuda.call("cuLaunchKernel", &[kernel + 1, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0]), 400);
    assert_eq!(cuda.call("fake_cuda_set_duration", &[c"wave_10us".word(), 77]), 0);
    let before = submitted(&cuda);
    let mut config = [1 | 1 << 32, 1 | 32 << 32, 1_u64 | 1 << 32, 0, 0, 0, 0];
    ok!(cuda.cuLaunchKernelEx(&mut config, kernel, 0, 0));
    ok!(cuda.cuLaunchKernelEx_ptsz(&mut config, kernel, 0, 0));
    assert_eq!(cuda.call("cuLaunchCooperativeKernel", &[kernel, 1, 1, 1, 32, 1, 1, 0, 0, 0]), 0);
    assert_eq!(submitted(&cuda) - before, 3 * 77);
}

#[test]
fn graphs_run_their_kernels() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"busy_3ms");
    let (mut graph, mut node, mut exec) = (0_u64, 0_u64, 0_u64);
    ok!(cuda.cuGraphCreate(&mut graph, 0));
    let mut params = [kernel, 1 | 1 << 32, 1 | 32 << 32, 1 | 1 << 32, 0, 0, 0];
    for _ in 0..4 {
        ok!(cuda.cuGraphAddKernelNode(&mut node, graph, 0, 0, &mut params));
    }
    ok!(cuda.cuGraphInstantiate_v2(&mut exec, graph, 0, 0, 0));
    let before = submitted(&cuda);
    ok!(cuda.cuGraphLaunch(exec, 0));
    ok!(cuda.cuGraphLaunch_ptsz(exec, 0));
    assert_eq!(submitted(&cuda) - before, 24 * MS);
    ok!(cuda.cuGraphExecDestroy(exec));
    assert_eq!(call!(cuda.cuGraphLaunch(exec, 0)), 1);
}

#[test]
fn a_captured_stream_runs_when_its_graph_does() {
    let cuda = Cuda::ready(SIMULATED);
    let kernel = cuda.kernel(c"busy_3ms");
    let (mut stream, mut side, mut event, mut graph, mut exec, mut p) =
        (0_u64, 0_u64, 0_u64, 0_u64, 0_u64, 0_u64);
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    ok!(cuda.cuStreamCreate(&mut side, 1));
    ok!(cuda.cuEventCreate(&mut event, 0));
    ok!(cuda.cuStreamBeginCapture_v2(stream, 1));
    assert_eq!(cuda.launch(kernel, stream), 0);
    ok!(cuda.cuEventRecord(event, stream));
    ok!(cuda.cuStreamWaitEvent(side, event, 0));
    assert_eq!(cuda.launch(kernel, side), 0, "the forked stream captures too");
    ok!(cuda.cuMemAllocAsync(&mut p, MIB, stream));
    ok!(cuda.cuMemFreeAsync(p, stream));
    let mut status = 0_u32;
    ok!(cuda.cuStreamIsCapturing(side, &mut status));
    assert_eq!((status, submitted(&cuda), cuda.beyond()), (1, 0, 2 * MIB), "only the module is there");
    ok!(cuda.cuStreamEndCapture(stream, &mut graph));
    ok!(cuda.cuStreamIsCapturing(side, &mut status));
    assert_eq!(status, 0);
    ok!(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    for _ in 0..2 {
        ok!(cuda.cuGraphLaunch(exec, stream));
    }
    assert_eq!(submitted(&cuda), 12 * MS);
}

#[test]
fn what_would_wait_for_a_capture_spoils_it() {
    let cuda = Cuda::ready(SIMULATED);
    for (case, mode, spoils) in [
        ("synchronise the stream", 1, "cuStreamSynchronize"),
        ("query it", 1, "cuStreamQuery"),
        ("synchronise the context", 0, "cuCtxSynchronize"),
        ("allocate", 0, "cuMemAlloc_v2"),
        ("allocate, thread-local", 1, "cuMemAlloc_v2"),
    ] {
        let (mut stream, mut graph, mut p) = (0_u64, 9_u64, 0_u64);
        ok!(cuda.cuStreamCreate(&mut stream, 1));
        ok!(cuda.cuStreamBeginCapture_v2(stream, mode));
        let arguments = if spoils == "cuMemAlloc_v2" { vec![(&mut p).word(), 64] } else { vec![stream] };
        assert_eq!(cuda.call(spoils, &arguments), 900, "{case}");
        assert_eq!((call!(cuda.cuStreamEndCapture(stream, &mut graph)), graph), (901, 0), "{case}");
        ok!(cuda.cuStreamDestroy_v2(stream));
    }
    let (mut stream, mut graph, mut p) = (0_u64, 0_u64, 0_u64);
    ok!(cuda.cuStreamCreate(&mut stream, 1));
    ok!(cuda.cuStreamBeginCapture_v2(stream, 2));
    ok!(cuda.cuMemAlloc_v2(&mut p, 64));
    ok!(cuda.cuStreamEndCapture(stream, &mut graph));
}

#[test]
fn host_functions_run_after_the_work_before_them() {
    use std::sync::atomic::{AtomicU32, Ordering};
    static CALLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn count(_: *mut std::ffi::c_void) {
        CALLED.fetch_add(1, Ordering::SeqCst);
    }
    let cuda = Cuda::ready(&[]);
    let kernel = cuda.kernel(c"busy_20ms");
    assert_eq!(cuda.launch(kernel, 0), 0);
    ok!(cuda.cuLaunchHostFunc(0, (count as *const ()).expose_provenance(), 0));
    assert_eq!(CALLED.load(Ordering::SeqCst), 0);
    ok!(cuda.cuCtxSynchronize());
    let start = std::time::Instant::now();
    while CALLED.load(Ordering::SeqCst) == 0 && start.elapsed().as_secs() < 5 {
        std::thread::yield_now();
    }
    assert_eq!(CALLED.load(Ordering::SeqCst), 1);
}
