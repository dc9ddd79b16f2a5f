//! What a scrape of a node with 100 containers of two cards each costs, under all three sets of names, and what one look
//! at them costs, with files on this machine's disk.

#![expect(clippy::unwrap_used, reason = "a bench that cannot be set up has failed")]
#![allow(dead_code, reason = "shared with the tests")]

#[path = "../tests/monitor/common/mod.rs"]
mod common;

use std::hint::black_box;

use common::{MIB, Node, S, sample, scrape_all};
use criterion::{Criterion, criterion_group, criterion_main};
use mullion_nodeagent::metrics::Metrics;
use mullion_region::extension;

const CONTAINERS: usize = 100;
const CARDS: [&str; 2] =
    ["GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa01", "GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa02"];

fn node() -> Node {
    let mut node = Node::new();
    for number in 0..CONTAINERS {
        let pod = format!("9c1f6a52-6d2e-4f3e-8f1a-{number:012}");
        node.pod(&pod, &["main"], &[(CARDS[0], 4096, 30), (CARDS[1], 4096, 30)]);
        let file = node.usage(&pod, "main");
        file.launch(node.unix_ns());
        file.count(0, extension::LIMIT_HITS_AT, 3);
        file.count(1, extension::PEAK_AT, 700 * MIB);
    }
    node
}

fn monitor(criterion: &mut Criterion) {
    let mut node = node();
    let me = std::process::id();
    let driver = sample(&CARDS, &[(CARDS[0], me, 300, 40)], common::START + S);
    let snapshot = node.look(Some(&driver)).snapshot;
    let metrics = Metrics::default();
    let length = scrape_all(&metrics, snapshot.clone()).len();
    let registry = common::registry_of(&metrics, snapshot);
    criterion.bench_function(&format!("scrape of {CONTAINERS} containers, {length} bytes"), |bench| {
        bench.iter(|| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, black_box(&registry)).unwrap();
            text
        });
    });
    criterion.bench_function(&format!("look at {CONTAINERS} containers"), |bench| {
        bench.iter(|| node.look(black_box(Some(&driver))));
    });
}

criterion_group!(benches, monitor);
criterion_main!(benches);
