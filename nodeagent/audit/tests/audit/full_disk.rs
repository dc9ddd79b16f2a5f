use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::given::{open, refused, rows, verify};

/// Runs `test` in a thread with a mount namespace of its own and a tmpfs of 512 KiB in it: nothing is left behind
/// however it ends.
fn on_a_small_disk(test: impl FnOnce(&Path) + Send + 'static) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let run = std::thread::spawn(move || {
        // Needs root, as the lab does.
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=512k")).unwrap();
        test(&path);
        umount2(&path, MntFlags::MNT_DETACH).unwrap();
    });
    if let Err(panic) = run.join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn a_full_disk_is_reported_and_ends_by_itself() {
    on_a_small_disk(|folder| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let path = folder.join("audit.db");
            let ballast = folder.join("ballast");
            std::fs::write(&ballast, vec![0; 128 * 1024]).unwrap();
            let log = open(&path).await;
            let mut acknowledged = Vec::new();
            let error = loop {
                match log.append(refused(&"x".repeat(2000))).await {
                    Ok(seq) => acknowledged.push(seq),
                    Err(error) => break error,
                }
                assert!(acknowledged.len() < 10_000, "512 KiB never filled");
            };
            assert_eq!(error.code(), "AuditDiskFull", "{error}: {:?}", std::error::Error::source(&error));
            assert!(error.to_string().contains("no space left"), "{error}");
            let again = log.append(refused(&"x".repeat(2000))).await.unwrap_err();
            assert_eq!(again.code(), "AuditDiskFull", "it goes on saying so");
            let failure = log.health().failure.expect("the failure shows");
            assert_eq!((failure.code, failure.refused), ("AuditDiskFull", 2));

            std::fs::remove_file(&ballast).unwrap();
            log.probe().await.unwrap();
            assert!(log.health().is_ok(), "space is back");
            acknowledged.push(log.append(refused("after")).await.unwrap());
            log.close().await;

            let found = verify(&path).await;
            assert!(found.is_ok(), "{found:?}");
            let rows = rows(&path).await;
            for seq in acknowledged {
                assert!(rows.iter().any(|row| row.seq == seq), "row {seq} was acknowledged");
            }
            let gaps: Vec<_> = rows.iter().filter(|row| row.kind == "AuditGap").collect();
            assert_eq!(gaps.len(), 1);
            assert_eq!(gaps[0].code.as_deref(), Some("AuditDiskFull"));
        });
    });
}

#[test]
fn a_disk_that_is_full_from_the_start_is_reported() {
    on_a_small_disk(|folder| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // All but 8 KiB.
            std::fs::write(folder.join("ballast"), vec![0; 504 * 1024]).unwrap();
            let options = mullion_audit::Options::new(folder.join("audit.db"), "node-a");
            let error = mullion_audit::AuditLog::open(options, jiff::Timestamp::now).await.unwrap_err();
            assert_eq!(error.code(), "AuditDiskFull", "{error}: {:?}", std::error::Error::source(&error));
        });
    });
}
