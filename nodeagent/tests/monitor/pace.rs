//! How containers are held to their shares, over many looks.

use mullion_region::{extension, usage};

use crate::common::{Node, S, container, grant_name, sample};

const ONE: u32 = 1 << 16;

fn scale(node: &Node, pod: &str) -> u32 {
    node.page(pod, "main").devices.iter().next().unwrap().scale.get()
}

fn switch(node: &Node, pod: &str) -> i32 {
    node.usage(pod, "main").number(usage::UTILIZATION_SWITCH_AT)
}

/// Two containers with 30 % of one card.
fn two() -> Node {
    let mut node = Node::new();
    for pod in ["p", "q"] {
        node.pod(pod, &["main"], &[("GPU-0", 1024, 30)]);
    }
    node.processes("p", "main", &[std::process::id()]);
    node
}

/// Looks while `pods` launch, each for half of the time by its own account; the driver sees `p` on the card for `percent`
/// of the time.
fn looks(node: &mut Node, looks: usize, pods: &[&str], percent: u32) {
    for _ in 0..looks {
        for pod in pods {
            let file = node.usage(pod, "main");
            file.launch(node.unix_ns() + S / 2);
            file.charge(S * 45 / 100);
        }
        let busy = ("GPU-0", std::process::id(), 300, percent);
        let told = sample(&["GPU-0"], &[busy], node.unix_ns() + S / 2);
        node.look(Some(&told));
    }
}

/// Alone it may use the whole card, and that is no reason to hold it shorter when somebody comes.
#[test]
fn what_a_container_used_while_it_was_alone_is_not_held_against_it() {
    let mut node = two();
    for visit in 0..20 {
        looks(&mut node, 8, &["p"], 100);
        assert_eq!(switch(&node, "p"), 0);
        // Two seconds of windows that began while it was held are more than this.
        looks(&mut node, 3, &["p", "q"], 100);
        assert_eq!(switch(&node, "p"), 1);
        assert_eq!(scale(&node, "p"), ONE, "visit {visit}");
    }
    looks(&mut node, 8, &["p", "q"], 100);
    assert!(scale(&node, "p") > ONE, "whoever stays is steered by");
}

/// A container that runs freely is shown as it runs.
#[test]
fn what_a_container_uses_is_shown_while_it_is_not_held() {
    let mut node = two();
    looks(&mut node, 8, &["p"], 80);
    looks(&mut node, 2, &["p", "q"], 80);
    looks(&mut node, 8, &["p"], 60);
    let told = sample(&["GPU-0"], &[("GPU-0", std::process::id(), 300, 60)], node.unix_ns() + S / 2);
    let looked = node.look(Some(&told));
    let per_mille = container(&looked.snapshot, "p", "main").measured[0].per_mille.unwrap();
    assert!((590..640).contains(&per_mille), "{per_mille}");
}

/// Kernels too long to be held to the share: a higher scale would not help, and starve what comes after.
#[test]
fn the_scale_goes_no_further_than_what_the_library_charged_calls_for() {
    // Card time charged per look, of 0.9 s, in tenths of a second. Of nothing, a multiple is nothing.
    for (charged, least, most) in [(9, 2 * ONE, 4 * ONE), (1, 8 * ONE, u32::MAX), (0, ONE, ONE)] {
        let mut node = two();
        for look in 0..60 {
            node.usage("p", "main").launch(node.unix_ns() + S / 2);
            node.usage("p", "main").count(0, extension::SPENT_NS_AT, look * charged * S / 10);
            looks(&mut node, 1, &["q"], 90);
        }
        let scale = scale(&node, "p");
        assert!(scale >= least && scale <= most, "{charged}: {scale}");
    }
}

/// Whoever waited once does not wait for ever: not to an agent that starts anew, and not where its page is gone.
#[test]
fn a_wait_counts_once() {
    let mut node = two();
    node.usage("q", "main").count(0, extension::WAIT_NS_AT, S);
    node.anew();
    looks(&mut node, 1, &["p"], 100);
    assert_eq!(switch(&node, "p"), 0, "nobody knows when it waited");
    std::fs::remove_file(node.settings.pages_dir().join(grant_name("q", "main"))).unwrap();
    node.usage("q", "main").count(0, extension::WAIT_NS_AT, 2 * S);
    looks(&mut node, 1, &["p"], 100);
    assert_eq!(switch(&node, "p"), 1);
    looks(&mut node, 1, &["p"], 100);
    assert_eq!(switch(&node, "p"), 0, "it waits no more");
}

/// A driver that is slow to answer makes looks late: whoever launched in between was at work all the same.
#[test]
fn a_late_look_takes_nobody_for_idle() {
    let mut node = two();
    looks(&mut node, 2, &["p", "q"], 30);
    for _ in 0..5 {
        for pod in ["p", "q"] {
            // Its next launch renews the stamp with the heartbeat, thus soon after a look.
            node.usage(pod, "main").launch(node.unix_ns() + S / 10);
        }
        node.look_after(S * 3 / 2, None);
        assert_eq!(["p", "q"].map(|pod| switch(&node, pod)), [1, 1]);
    }
}
