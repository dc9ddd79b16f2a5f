use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use mullion_audit::Event;

use crate::given::{open, place, refused, rows, verify};

const CHILD: &str = "MULLION_TEST_AUDIT_CHILD";

/// Not a test by itself: the process that [`kill_9_in_the_middle_of_a_batch_loses_nothing`] kills. Sixteen tasks
/// append as fast as they can and print what was acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_child() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let log = open(path.as_ref()).await;
    let process = std::process::id();
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let log = log.clone();
            tokio::spawn(async move {
                for i in 0.. {
                    let text = format!("{process}-{task}-{i}");
                    let seq = log.append(refused(&text)).await.unwrap();
                    // One write of one line: a kill cannot cut it short in the pipe.
                    std::io::stdout().write_all(format!("acknowledged {seq} {text}\n").as_bytes()).unwrap();
                    std::io::stdout().flush().unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

// "agent killed at any instruction: no audit event lost or doubled"
#[tokio::test]
async fn kill_9_in_the_middle_of_a_batch_loses_nothing() {
    let at = place();
    let mut acknowledged = BTreeMap::new();
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::writer_child", "--nocapture"])
            .env(CHILD, &at.path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        for line in lines {
            let line = line.unwrap();
            // The test harness prints lines of its own around ours.
            let Some(at) = line.find("acknowledged ") else { continue };
            let mut words = line[at..].split(' ').skip(1);
            let (Some(seq), Some(text)) = (words.next(), words.next()) else { continue };
            acknowledged.insert(text.to_owned(), seq.parse::<u64>().unwrap());
            seen += 1;
            if seen == 40 + 23 * round {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(seen >= 40, "round {round}: the child wrote");
    }

    // The lock and the log are free again, and a new writer goes on.
    let log = open(&at.path).await;
    log.append(refused("after")).await.unwrap();
    log.close().await;
    let found = verify(&at.path).await;
    assert!(found.is_ok(), "{found:?}");
    let mut written = BTreeMap::new();
    for row in rows(&at.path).await {
        let Event::PrepareRefused { message, .. } = row.event().unwrap() else { continue };
        assert_eq!(written.insert(message.clone(), row.seq), None, "{message} is there twice");
    }
    for (text, seq) in &acknowledged {
        assert_eq!(written.get(text), Some(seq), "{text} was acknowledged");
    }
}
