//! The images that every lab node has, made from this machine's own programs: no registry is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::archive::{self, Entry, Image, Kind};
use crate::children::Children;
use crate::fakes::CUDA_BUILT;
use crate::layout::Plan;

/// Programs of the `lab.local/glibc:1` image.
const PROGRAMS: &[&str] = &[
    "sh", "cat", "chmod", "cp", "date", "dd", "echo", "env", "false", "grep", "head", "id", "ln", "ls",
    "mkdir", "mv", "printf", "readlink", "rm", "sed", "sleep", "sort", "stat", "tail", "test", "touch", "tr",
    "true", "uname", "wc",
];
/// Libraries that programs built elsewhere may ask for, beyond what ours need.
const LIBRARIES: &[&str] = &[
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
];

/// Writes the archive of all images to `to`.
pub fn write(children: &Children, plan: &Plan, to: &Path) -> Result<()> {
    let mut glibc = glibc(children)?;
    glibc.entries.extend(probes(children, plan, to.parent().unwrap_or(to))?);
    let images = [pause(&plan.parts)?, busybox(children)?, glibc];
    let file = fs::File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    archive::write(&images, BufWriter::new(file))
}

fn pause(parts: &Path) -> Result<Image> {
    let entries = vec![file("pause", &parts.join("pause"), 0o755)?];
    Ok(Image { name: "lab.local/pause:1".into(), command: vec!["/pause".into()], entries })
}

fn busybox(children: &Children) -> Result<Image> {
    let mut entries = base(&["bin", "sbin", "usr", "usr/bin", "usr/sbin"]);
    entries.push(file("bin/busybox", Path::new("/bin/busybox"), 0o755)?);
    let applets = children.run(Command::new("/bin/busybox").arg("--list-full"))?;
    for applet in applets.lines().filter(|applet| *applet != "bin/busybox") {
        if ["bin/", "sbin/", "usr/bin/", "usr/sbin/"].iter().any(|dir| applet.starts_with(dir)) {
            entries.push(link(applet, "/bin/busybox"));
        }
    }
    Ok(Image { name: "lab.local/busybox:1".into(), command: vec!["/bin/sh".into()], entries })
}

fn glibc(children: &Children) -> Result<Image> {
    let mut entries =
        base(&["usr", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/local", "usr/local/bin"]);
    for dir in ["bin", "sbin", "lib", "lib64"] {
        entries.push(link(dir, &format!("usr/{dir}")));
    }
    let mut libraries = BTreeMap::new();
    for program in PROGRAMS {
        let from = find_program(program)?;
        let needs = children.run(Command::new("ldd").arg(&from))?;
        libraries.extend(parse_ldd(&needs));
        entries.push(file(&format!("usr/bin/{program}"), &from, 0o755)?);
    }
    if let Some(dir) =
        libraries.get("libc.so.6").and_then(|path| Path::new(path).parent()).map(Path::to_owned)
    {
        for name in LIBRARIES {
            let path = dir.join(name);
            if path.exists() {
                libraries.insert((*name).to_owned(), path.to_string_lossy().into_owned());
            }
        }
    }
    let mut dirs: BTreeSet<PathBuf> = BTreeSet::new();
    for path in libraries.values() {
        // The image has the merged layout, whatever this machine has.
        let inside = Path::new("usr").join(path.trim_start_matches("/usr").trim_start_matches('/'));
        for dir in inside
            .ancestors()
            .skip(1)
            .filter(|dir| dir.components().count() > 2)
            .collect::<Vec<_>>()
            .iter()
            .rev()
        {
            if dirs.insert((*dir).to_owned()) {
                entries.push(Entry {
                    path: dir.to_string_lossy().into_owned(),
                    mode: 0o755,
                    kind: Kind::Dir,
                });
            }
        }
        entries.push(file(&inside.to_string_lossy(), Path::new(path), 0o755)?);
    }
    Ok(Image { name: "lab.local/glibc:1".into(), command: vec!["/bin/sh".into()], entries })
}

/// The test program of the CUDA driver API, built here in a moment: as `vgpu-probe`, which loads the driver itself, and
/// as `vgpu-probe-linked`, which the loader gives it, where there is a driver to link to.
fn probes(children: &Children, plan: &Plan, scratch: &Path) -> Result<Vec<Entry>> {
    let source = plan.source.join("tests/lab/images/vgpu-probe.c");
    let driver = plan.bin.join(CUDA_BUILT);
    let mut entries = Vec::new();
    for name in ["vgpu-probe", "vgpu-probe-linked"] {
        let linked = name.ends_with("linked");
        if linked && !driver.exists() {
            continue;
        }
        let program = scratch.join(name);
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=c11", "-O2", "-s", "-o"]).arg(&program).arg(&source);
        if linked {
            gcc.arg("-DLINKED").arg(&driver);
        }
        children.run(gcc.arg("-ldl")).with_context(|| format!("cannot build {name}"))?;
        entries.push(file(&format!("usr/local/bin/{name}"), &program, 0o755)?);
    }
    Ok(entries)
}

/// Folders and accounts that programs expect in any root.
fn base(dirs: &[&str]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = ["dev", "etc", "proc", "root", "run", "sys", "var"]
        .iter()
        .chain(dirs)
        .map(|dir| Entry { path: (*dir).to_owned(), mode: 0o755, kind: Kind::Dir })
        .collect();
    entries.push(Entry { path: "tmp".into(), mode: 0o1777, kind: Kind::Dir });
    for (path, text) in [
        ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ] {
        entries.push(Entry { path: path.into(), mode: 0o644, kind: Kind::File(text.into()) });
    }
    entries
}

fn file(path: &str, from: &Path, mode: u32) -> Result<Entry> {
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    Ok(Entry { path: path.to_owned(), mode, kind: Kind::File(content) })
}

fn link(path: &str, target: &str) -> Entry {
    Entry { path: path.to_owned(), mode: 0o777, kind: Kind::Link(target.to_owned()) }
}

fn find_program(name: &str) -> Result<PathBuf> {
    ["/usr/bin", "/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.exists())
        .with_context(|| format!("this machine has no /usr/bin/{name}, which the glibc image needs"))
}

/// Library name -> path, from what `ldd` prints; the loader is in it, the kernel's own page is not.
fn parse_ldd(output: &str) -> BTreeMap<String, String> {
    output
        .lines()
        .filter_map(|line| {
            let path = line.split_whitespace().find(|word| word.starts_with('/'))?;
            let name = Path::new(path).file_name()?.to_str()?;
            Some((name.to_owned(), path.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ldd() {
        let output = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let want = [
            ("ld-linux-x86-64.so.2".to_owned(), "/lib64/ld-linux-x86-64.so.2".to_owned()),
            ("libc.so.6".to_owned(), "/lib/x86_64-linux-gnu/libc.so.6".to_owned()),
        ];
        assert_eq!(parse_ldd(output), BTreeMap::from(want));
        assert_eq!(parse_ldd("\tnot a dynamic executable\n"), BTreeMap::new(), "static");
    }
}
