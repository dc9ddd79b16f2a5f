//! Every target over its corpus and over mutations of that, always the same ones.

#![expect(clippy::unwrap_used, reason = "a test program: a panic is how it fails")]

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use mullion_fuzz::TARGETS;

/// Mutations of each input.
const MUTATIONS: u64 = 200;

/// Words that readers look for, put where they are not expected.
const WORDS: [&str; 12] = [
    "\"",
    "{",
    "]",
    ":",
    "-1",
    "1e999",
    "null",
    "nvidia.com/gpu",
    "18446744073709551616",
    "\u{fffd}",
    "\\u0000",
    "=\n[",
];

/// A small generator of numbers (xorshift): the seed decides all of them.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % (sides.max(1) as u64)).unwrap()
    }
}

fn mutated(input: &[u8], seed: u64) -> Vec<u8> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut data = input.to_vec();
    for _ in 0..=dice.roll(4) {
        let at = dice.roll(data.len() + 1);
        match dice.roll(6) {
            0 => data.truncate(at),
            1 if at < data.len() => data[at] ^= 1 << dice.roll(8),
            2 if at < data.len() => data[at] = [0, 0xff, b'9', b'"', b'\n'][dice.roll(5)],
            3 => {
                let word = WORDS[dice.roll(WORDS.len())];
                data.splice(at..at, word.bytes());
            }
            4 => {
                let end = (at + dice.roll(64)).min(data.len());
                let piece = data[at..end].to_vec();
                let to = dice.roll(data.len() + 1);
                data.splice(to..to, piece);
            }
            _ => {
                let end = (at + dice.roll(16)).min(data.len());
                data.drain(at..end);
            }
        }
    }
    data
}

#[test]
fn targets_withstand_their_corpus_and_mutations_of_it() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, target) in TARGETS {
        let files = fs::read_dir(corpus.join(name)).unwrap_or_else(|error| panic!("corpus/{name}: {error}"));
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        assert!(files.len() > 1, "corpus/{name} has nothing to begin with");
        for file in files {
            let input = fs::read(&file).unwrap();
            let shown = file.display().to_string();
            catch_unwind(|| target(&input)).unwrap_or_else(|_| panic!("{name}: {shown}"));
            for seed in 1..=MUTATIONS {
                let data = mutated(&input, seed);
                let keep = std::env::temp_dir().join(format!("mullion-fuzz-{name}-{seed}"));
                if catch_unwind(|| target(&data)).is_err() {
                    fs::write(&keep, &data).unwrap();
                    panic!("{name}: mutation {seed} of {shown}, kept as {}", keep.display());
                }
            }
        }
    }
}

/// A target that accepts nothing would find nothing: for each, one input is read to the end.
#[test]
fn the_corpus_reaches_what_is_accepted() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let names: Vec<String> =
        fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    for name in &names {
        assert!(mullion_fuzz::target(name).is_some(), "corpus/{name} belongs to no target");
    }
    let read = |path: &str| fs::read(corpus.join(path)).unwrap();
    let page = read("control_page/good");
    assert!(mullion_region::page::decode(&page).is_ok());
    let extension = read("usage_extension/good");
    assert!(mullion_region::extension::check(&extension).is_ok());
    let checkpoint = read("kubelet_checkpoint/good.json");
    let owners = mullion_nodeagent::checkpoint::parse(&checkpoint, "nvidia.com/gpu").unwrap();
    assert!(owners.iter().any(|owner| owner.grant.is_some()), "{owners:?}");
    let spec = String::from_utf8(read("driver_spec/good.yaml")).unwrap();
    let spec = mullion_nodeagent::prepare::driver_files::parse(Path::new("f"), &spec).unwrap();
    assert!(spec.is_some());
}
