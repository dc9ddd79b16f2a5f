//! Which driver files a container needs: taken from NVIDIA's own CDI spec on the node, whatever naming it uses.
//!
//! The spec is what `nvidia-ctk cdi generate` or the GPU operator writes, kind `nvidia.com/gpu`. Where there is none
//! and `nvidia-ctk` is on the node, it is asked for one, into a folder of ours: in a folder that the runtime reads, any
//! pod could name the devices in it.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::process::Command;
use tracing::{info, warn};

use crate::prepare::cdi::{ContainerEdits, Device, Spec};

/// Kind of NVIDIA's spec.
pub const DRIVER_KIND: &str = "nvidia.com/gpu";
/// How long `nvidia-ctk` may take.
const GENERATE_TIMEOUT: Duration = Duration::from_secs(15);
/// The largest file that is read as a spec, in bytes; `nvidia-ctk` writes some tens of KiB.
const MAX_SPEC: u64 = 4 << 20;

/// A card as a CDI spec may name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardName {
    /// NVML's uuid.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// `/dev/nvidia<minor>`.
    pub minor: u32,
}

/// NVIDIA's spec, from one file.
#[derive(Clone, Debug, PartialEq)]
pub struct DriverSpec {
    /// Where it came from.
    pub file: PathBuf,
    /// What it says.
    pub spec: Spec,
}

/// The spec has no device for a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "NVIDIA's CDI spec has no device with /dev/nvidia{minor} or named {uuid} or {index} ({files}): generate it anew \
     with `nvidia-ctk cdi generate`"
)]
pub struct NoDevice {
    /// The card.
    pub uuid: String,
    /// Its minor.
    pub minor: u32,
    /// Its index.
    pub index: u32,
    /// The files that were looked at.
    pub files: String,
}

/// Reads a spec; `None` when it is of another kind.
///
/// # Errors
/// What is wrong with the file, in words.
pub fn parse(file: &Path, text: &str) -> Result<Option<DriverSpec>, String> {
    // JSON is YAML.
    let spec: Spec = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
    Ok((spec.kind == DRIVER_KIND).then(|| DriverSpec { file: file.to_owned(), spec }))
}

/// The edits that give a container `cards`: the common ones, then each card's. Later specs win.
///
/// # Errors
/// [`NoDevice`] for the first card that no single spec has together with the others.
pub fn edits_for(specs: &[DriverSpec], cards: &[CardName]) -> Result<(String, ContainerEdits), NoDevice> {
    let mut missing = None;
    for spec in specs.iter().rev() {
        match from_one(&spec.spec, cards) {
            Ok(edits) => return Ok((spec.spec.cdi_version.clone(), edits)),
            Err(card) => missing = missing.or(Some(card)),
        }
    }
    let card = missing.or(cards.first()).cloned();
    let files: Vec<_> = specs.iter().map(|s| s.file.display().to_string()).collect();
    let CardName { uuid, index, minor } =
        card.unwrap_or(CardName { uuid: "no card".to_owned(), index: 0, minor: 0 });
    Err(NoDevice { uuid, index, minor, files: files.join(", ") })
}

fn from_one<'a>(spec: &Spec, cards: &'a [CardName]) -> Result<ContainerEdits, &'a CardName> {
    let mut edits = spec.container_edits.clone();
    for card in cards {
        edits.merge(&find(spec, card).ok_or(card)?.container_edits);
    }
    Ok(edits)
}

/// By device node first: that is what the container opens. Names only where a device lists no card's node.
fn find<'a>(spec: &'a Spec, card: &CardName) -> Option<&'a Device> {
    let whole = |d: &&Device| !d.container_edits.device_nodes.iter().any(|n| n.path.contains("nvidia-caps/"));
    let by_node = spec.devices.iter().filter(whole).find(|d| minors(d) == BTreeSet::from([card.minor]));
    let named = |names: &[String]| {
        let free = |d: &&Device| minors(d).is_empty() && names.contains(&d.name);
        spec.devices.iter().filter(whole).find(free)
    };
    by_node
        .or_else(|| named(std::slice::from_ref(&card.uuid)))
        .or_else(|| named(&[card.index.to_string(), format!("gpu{}", card.index)]))
}

/// The cards whose nodes a device lists. `all` lists several, a MIG device its parent's.
fn minors(device: &Device) -> BTreeSet<u32> {
    let nodes = device.container_edits.device_nodes.iter();
    nodes.filter_map(|n| n.path.strip_prefix("/dev/nvidia")?.parse().ok()).collect()
}

/// What a file looked like when it was read.
type Stamp = Vec<(PathBuf, Option<SystemTime>, u64)>;

/// What was found when the files looked like that.
#[derive(Debug, Default)]
struct Looked {
    stamp: Stamp,
    specs: Arc<Vec<DriverSpec>>,
    /// Files that say nothing, each with its reason.
    unread: Arc<Vec<String>>,
}

/// Finds NVIDIA's spec on the node and keeps it until its files change.
#[derive(Debug)]
pub struct Finder {
    dirs: Vec<PathBuf>,
    generated: PathBuf,
    cache: Mutex<Looked>,
    generate: tokio::sync::Mutex<Option<std::time::Instant>>,
}

impl Finder {
    /// Looks in `dirs`, later ones win; `generated` is where a spec of `nvidia-ctk` goes.
    #[must_use]
    pub fn new(dirs: Vec<PathBuf>, generated: PathBuf) -> Self {
        Self { dirs, generated, cache: Mutex::default(), generate: tokio::sync::Mutex::default() }
    }

    /// All specs of NVIDIA's kind, the one that wins last; empty where there is none.
    #[must_use]
    pub fn look(&self) -> Arc<Vec<DriverSpec>> {
        let stamp = self.stamp();
        let mut cache = self.cache.lock();
        if cache.stamp != stamp {
            let mut specs = Vec::new();
            let mut unread = Vec::new();
            for (file, ..) in &stamp {
                match read(file) {
                    Ok(spec) => specs.extend(spec),
                    Err(problem) => {
                        warn!(?file, problem, "CDI spec not read");
                        unread.push(format!("{}: {problem}", file.display()));
                    }
                }
            }
            *cache = Looked { stamp, specs: Arc::new(specs), unread: Arc::new(unread) };
        }
        Arc::clone(&cache.specs)
    }

    /// The files that could be a spec and cannot be read, each with its reason, as of the last look.
    #[must_use]
    pub fn unread(&self) -> Arc<Vec<String>> {
        Arc::clone(&self.cache.lock().unread)
    }

    /// Where nothing was found, and what may be in the way of it.
    #[must_use]
    pub fn missing(&self) -> String {
        let dirs: Vec<_> = self.dirs.iter().map(|d| d.display().to_string()).collect();
        let unread = self.unread();
        if unread.is_empty() {
            format!("in {}, and no nvidia-ctk to make one", dirs.join(", "))
        } else {
            format!("in {} that can be read ({})", dirs.join(", "), unread.join("; "))
        }
    }

    /// As [`Self::look`], but asks `nvidia-ctk` for a spec where there is none.
    pub async fn find(&self) -> Arc<Vec<DriverSpec>> {
        let specs = self.look();
        if !specs.is_empty() {
            return specs;
        }
        let mut tried = self.generate.lock().await;
        if self.look().is_empty() && tried.is_none_or(|t| t.elapsed() > GENERATE_TIMEOUT) {
            *tried = Some(std::time::Instant::now());
            self.generate().await;
        }
        self.look()
    }

    async fn generate(&self) {
        let mut command = Command::new("nvidia-ctk");
        command.args(["cdi", "generate", "--format", "yaml", "--output"]).arg(&self.generated);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        match tokio::time::timeout(GENERATE_TIMEOUT, command.output()).await {
            Ok(Ok(output)) if output.status.success() => {
                info!(file = ?self.generated, "nvidia-ctk wrote a CDI spec");
            }
            Ok(Ok(output)) => {
                warn!(status = %output.status, stderr = %String::from_utf8_lossy(&output.stderr), "nvidia-ctk failed");
            }
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {}
            Ok(Err(error)) => warn!(%error, "cannot run nvidia-ctk"),
            Err(_) => warn!(after = ?GENERATE_TIMEOUT, "nvidia-ctk does not end"),
        }
    }

    fn stamp(&self) -> Stamp {
        let mut files = vec![self.generated.clone()];
        for dir in &self.dirs {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let ours = |name: &str| name.starts_with("mullion.io-grant-");
            let spec = |p: &PathBuf| matches!(p.extension().and_then(|e| e.to_str()), Some("yaml" | "json"));
            let mut found: Vec<_> = entries
                .filter(|e| !e.file_name().to_str().is_some_and(ours))
                .map(|e| e.path())
                .filter(spec)
                .collect();
            found.sort_unstable();
            files.extend(found);
        }
        let stat = |file: PathBuf| {
            let meta = std::fs::metadata(&file).ok()?;
            // Opening a pipe would wait for a writer, for ever and with it the agent; a device may have no end.
            meta.is_file().then(|| (file, meta.modified().ok(), meta.len()))
        };
        files.into_iter().filter_map(stat).collect()
    }
}

/// `None` for a spec of another kind.
fn read(file: &Path) -> Result<Option<DriverSpec>, String> {
    let text = read_text(file).map_err(|e| e.to_string())?;
    // What a parser says may go over many lines, with a picture.
    parse(file, &text).map_err(|problem| problem.lines().next().unwrap_or_default().trim().to_owned())
}

fn read_text(file: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(file)?.take(MAX_SPEC + 1).read_to_string(&mut text)?;
    if read as u64 > MAX_SPEC {
        return Err(std::io::Error::other(format!("it is larger than {MAX_SPEC} bytes: no CDI spec is")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(index: u32, minor: u32) -> CardName {
        CardName { uuid: format!("GPU-{minor}"), index, minor }
    }

    /// In the shape of `nvidia-ctk cdi generate`, shortened.
    fn generated(names: [&str; 2]) -> String {
        format!(
            "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  deviceNodes:\n  - path: /dev/nvidiactl\n  - path: \
             /dev/nvidia-uvm\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n  hooks:\n  - hookName: createContainer\n    path: \
             /usr/bin/nvidia-cdi-hook\n    args: [nvidia-cdi-hook, update-ldcache]\n  mounts:\n  - hostPath: \
             /usr/lib/libcuda.so.1\n    containerPath: /usr/lib/libcuda.so.1\n    options: [ro, nosuid, nodev, rbind]\n\
             devices:\n- name: \"{}\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n    - path: \
             /dev/dri/card1\n- name: \"{}\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia1\n- name: \"0:1\"\n  \
             containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n    - path: /dev/nvidia-caps/nvidia-cap30\n\
             - name: all\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n    - path: /dev/nvidia1\n",
            names[0], names[1]
        )
    }

    fn spec(text: &str) -> DriverSpec {
        parse(Path::new("/etc/cdi/nvidia.yaml"), text).unwrap().unwrap()
    }

    fn nodes(edits: &ContainerEdits) -> Vec<&str> {
        edits.device_nodes.iter().map(|n| n.path.as_str()).collect()
    }

    #[test]
    fn a_card_is_found_whatever_the_naming() {
        for (case, names) in [
            ("index", ["0", "1"]),
            ("index, in another order than NVML's", ["1", "0"]),
            ("uuid", ["GPU-0", "GPU-1"]),
            ("type-index", ["gpu0", "gpu1"]),
            ("unknown", ["first", "second"]),
        ] {
            let specs = [spec(&generated(names))];
            let (version, edits) = edits_for(&specs, &[card(1, 0)]).unwrap();
            assert_eq!(version, "0.5.0", "{case}");
            assert_eq!(
                nodes(&edits),
                ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/dri/card1"],
                "{case}"
            );
            assert_eq!((edits.hooks.len(), edits.mounts.len(), edits.env.len()), (1, 1, 1), "{case}");
            let (_, edits) = edits_for(&specs, &[card(1, 1), card(0, 0)]).unwrap();
            let want =
                ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia0", "/dev/dri/card1"];
            assert_eq!(nodes(&edits), want, "{case}");
        }
    }

    #[test]
    fn names_count_only_where_no_node_says_otherwise() {
        let text = |nodes: &str| {
            format!(
                "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: GPU-7\n  containerEdits: {{{nodes}}}\n- name: \"3\"\n  containerEdits: {{}}\n"
            )
        };
        let free = [spec(&text("env: [BY=uuid]"))];
        assert_eq!(edits_for(&free, &[card(0, 7)]).unwrap().1.env, ["BY=uuid"]);
        assert!(edits_for(&free, &[card(3, 9)]).is_ok(), "by index");
        let other = [spec(&text("deviceNodes: [{path: /dev/nvidia1}]"))];
        let error = edits_for(&other, &[card(0, 7)]).unwrap_err();
        assert!(
            error.to_string().contains("/dev/nvidia7") && error.to_string().contains("nvidia.yaml"),
            "{error}"
        );
    }

    #[test]
    fn the_later_folder_wins_and_other_kinds_do_not_count() {
        let (early, late) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let finder = Finder::new(vec![early.path().into(), late.path().into()], early.path().join("none"));
        assert!(finder.look().is_empty());
        std::fs::write(early.path().join("a.yaml"), generated(["0", "1"])).unwrap();
        std::fs::write(
            early.path().join("nic.json"),
            r#"{"cdiVersion":"0.5.0","kind":"example.com/nic","devices":[]}"#,
        )
        .unwrap();
        std::fs::write(early.path().join("broken.yaml"), "{").unwrap();
        assert_eq!(finder.look().len(), 1);
        std::fs::write(late.path().join("b.yaml"), generated(["0", "1"]).replace("0.5.0", "0.6.0")).unwrap();
        std::fs::write(late.path().join("mullion.io-grant-0123456789abcdef.json"), generated(["0", "1"]))
            .unwrap();
        assert_eq!(finder.look().len(), 2);
        assert_eq!(edits_for(&finder.look(), &[card(0, 0)]).unwrap().0, "0.6.0");
        std::fs::remove_file(late.path().join("b.yaml")).unwrap();
        assert_eq!(edits_for(&finder.look(), &[card(0, 0)]).unwrap().0, "0.5.0");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let finder = Finder::new(vec![dir.path().into()], at("none"));
        assert!(finder.look().is_empty() && finder.unread().is_empty());
        assert!(finder.missing().ends_with("and no nvidia-ctk to make one"), "{}", finder.missing());
        std::fs::write(at("nvidia.yaml"), "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [").unwrap();
        std::fs::write(at("other.json"), r#"{"cdiVersion":"0.5.0","kind":"example.com/nic","devices":[]}"#)
            .unwrap();
        assert!(finder.look().is_empty());
        let unread = finder.unread();
        let [problem] = unread.as_slice() else { panic!("{unread:?}") };
        assert!(problem.starts_with(&format!("{}: ", at("nvidia.yaml").display())), "{problem}");
        assert!(problem.contains("line") && !problem.contains('\n'), "{problem}");
        assert!(finder.missing().contains(problem), "{}", finder.missing());
        std::fs::write(at("nvidia.yaml"), generated(["0", "1"])).unwrap();
        assert_eq!((finder.look().len(), finder.unread().len()), (1, 0));
    }

    #[test]
    fn what_is_no_file_or_has_no_end_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let fifo = std::process::Command::new("mkfifo").arg(at("a.yaml")).status().unwrap();
        assert!(fifo.success());
        std::os::unix::fs::symlink("/dev/zero", at("b.yaml")).unwrap();
        std::fs::create_dir(at("c.yaml")).unwrap();
        std::fs::write(at("d.yaml"), " ".repeat(usize::try_from(MAX_SPEC).unwrap() + 1)).unwrap();
        std::fs::write(at("e.yaml"), generated(["0", "1"])).unwrap();
        let finder = Finder::new(vec![dir.path().into()], at("none"));
        assert_eq!(finder.look().iter().map(|s| s.file.clone()).collect::<Vec<_>>(), [at("e.yaml")]);
    }
}
