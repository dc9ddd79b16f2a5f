//! Writes container images as a docker-archive tar, which `ctr images import` reads.

use std::io::Write;

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

/// What a tar entry is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// A folder.
    Dir,
    /// A file with its content.
    File(Vec<u8>),
    /// A symbolic link and where it points.
    Link(String),
}

/// One entry of a layer.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Path without a leading slash.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Content.
    pub kind: Kind,
}

/// An image of one layer.
#[derive(Clone, Debug)]
pub struct Image {
    /// Name and tag, `lab.local/pause:1`.
    pub name: String,
    /// What runs when a pod names no command.
    pub command: Vec<String>,
    /// The root folder's content, parents before children.
    pub entries: Vec<Entry>,
}

/// Writes one archive that holds all `images`.
///
/// # Errors
/// When writing fails or a path does not fit a tar header.
pub fn write(images: &[Image], out: impl Write) -> Result<()> {
    let mut tar = Tar { out };
    let mut manifest = Vec::new();
    for image in images {
        let mut layer = Tar { out: Vec::new() };
        for entry in &image.entries {
            layer.append(entry)?;
        }
        let layer = layer.finish()?;
        let digest = hex::encode(Sha256::digest(&layer));
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {"Cmd": image.command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
            "history": [{"created_by": "mullion-lab"}],
        })
        .to_string();
        let config_name = format!("{}.json", hex::encode(Sha256::digest(&config)));
        let layer_name = format!("{digest}.tar");
        tar.append(&Entry { path: layer_name.clone(), mode: 0o644, kind: Kind::File(layer) })?;
        tar.append(&Entry { path: config_name.clone(), mode: 0o644, kind: Kind::File(config.into_bytes()) })?;
        manifest.push(json!({"Config": config_name, "RepoTags": [image.name], "Layers": [layer_name]}));
    }
    let manifest = serde_json::to_vec(&manifest)?;
    tar.append(&Entry { path: "manifest.json".into(), mode: 0o644, kind: Kind::File(manifest) })?;
    tar.finish()?;
    Ok(())
}

/// The machine's architecture under Go's name.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

struct Tar<W> {
    out: W,
}

impl<W: Write> Tar<W> {
    fn append(&mut self, entry: &Entry) -> Result<()> {
        let (kind, target, content): (u8, &str, &[u8]) = match &entry.kind {
            Kind::Dir => (b'5', "", &[]),
            Kind::File(content) => (b'0', "", content),
            Kind::Link(target) => (b'2', target, &[]),
        };
        let header = header(&entry.path, entry.mode, kind, target, content.len())
            .with_context(|| format!("{} does not fit a tar header", entry.path))?;
        self.out.write_all(&header)?;
        self.out.write_all(content)?;
        self.out.write_all(&vec![0; content.len().next_multiple_of(512) - content.len()])?;
        Ok(())
    }

    fn finish(mut self) -> Result<W> {
        self.out.write_all(&[0; 1024])?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// A ustar header, owner 0, time 0: the same content gives the same image.
fn header(path: &str, mode: u32, kind: u8, target: &str, size: usize) -> Option<[u8; 512]> {
    let mut block = [0u8; 512];
    let mut put = |at: usize, width: usize, text: &str| {
        (text.len() <= width).then(|| block[at..at + text.len()].copy_from_slice(text.as_bytes()))
    };
    put(0, 100, path)?;
    put(100, 8, &format!("{mode:07o}"))?;
    put(108, 8, "0000000")?;
    put(116, 8, "0000000")?;
    put(124, 12, &format!("{size:011o}"))?;
    put(136, 12, "00000000000")?;
    put(148, 8, "        ")?;
    put(157, 100, target)?;
    put(257, 8, "ustar\u{0}00")?;
    block[156] = kind;
    // The checksum counts its own field as spaces, which it holds at this point.
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Some(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn image() -> Image {
        let entry = |path: &str, mode, kind| Entry { path: path.into(), mode, kind };
        Image {
            name: "lab.local/test:1".into(),
            command: vec!["/bin/run".into()],
            entries: vec![
                entry("bin", 0o755, Kind::Dir),
                entry("bin/run", 0o755, Kind::File(vec![7; 513])),
                entry("bin/sh", 0o777, Kind::Link("/bin/run".into())),
            ],
        }
    }

    /// The system's tar is the judge of the format.
    fn list(archive: &[u8]) -> String {
        let mut tar = Command::new("tar")
            .args(["-tvf", "-", "--numeric-owner"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        tar.stdin.take().unwrap().write_all(archive).unwrap();
        let output = tar.wait_with_output().unwrap();
        assert!(output.status.success(), "tar refuses the archive");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn tar_reads_a_layer() {
        let mut layer = Tar { out: Vec::new() };
        for entry in &image().entries {
            layer.append(entry).unwrap();
        }
        let listing = list(&layer.finish().unwrap());
        let lines: Vec<_> = listing.lines().collect();
        assert!(lines[0].starts_with("drwxr-xr-x 0/0"), "{listing}");
        assert!(lines[1].contains(" 513 ") && lines[1].ends_with("bin/run"), "{listing}");
        assert!(lines[2].ends_with("bin/sh -> /bin/run"), "{listing}");
    }

    #[test]
    fn an_archive_names_its_images_and_is_reproducible() {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        write(&[image()], &mut one).unwrap();
        write(&[image()], &mut two).unwrap();
        assert_eq!(one, two);
        let listing = list(&one);
        assert_eq!(listing.lines().count(), 3, "{listing}");
        assert!(listing.trim_end().ends_with("manifest.json"), "{listing}");
    }

    #[test]
    fn a_path_too_long_is_refused() {
        let long = Entry { path: "x".repeat(101), mode: 0o644, kind: Kind::Dir };
        assert!(Tar { out: Vec::new() }.append(&long).is_err());
    }
}
