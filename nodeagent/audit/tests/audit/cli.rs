use clap::{Parser, Subcommand};
use jiff::Timestamp;
use mullion_audit::cli::{AuditArgs, run_with};
use mullion_audit::{AuditLog, CardState, Event, Options};

use crate::given::{CARD_A, Hands, open, place, prepared, refused, reserved, share, small_log};

/// A program as the agent is: `audit` among its subcommands.
#[derive(Parser)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Audit(AuditArgs),
}

struct Answer {
    code: Result<u8, (&'static str, String)>,
    out: String,
    remarks: String,
}

async fn ask(path: &std::path::Path, words: &[&str]) -> Answer {
    let path = path.to_str().unwrap();
    let words = ["agent", "audit"].into_iter().chain(words.iter().copied()).chain(["--db", path]);
    let Command::Audit(args) = Program::try_parse_from(words).unwrap().command;
    let (mut out, mut remarks) = (Vec::new(), Vec::new());
    let code = run_with(&args, Timestamp::now(), &mut out, &mut remarks).await;
    Answer {
        code: code.map_err(|e| (e.code(), e.to_string())),
        out: String::from_utf8(out).unwrap(),
        remarks: String::from_utf8(remarks).unwrap(),
    }
}

#[tokio::test]
async fn questions_are_answered_in_each_form() {
    let at = place();
    small_log(&at.path).await;

    let list = ask(&at.path, &["list"]).await;
    assert_eq!(list.code, Ok(0));
    let lines: Vec<&str> = list.out.lines().collect();
    assert_eq!(lines.len(), 6, "{}", list.out);
    assert!(lines[0].starts_with("SEQ  TIME"), "{}", list.out);
    assert!(lines[3].contains("Prepared") && lines[3].contains("team/train") && lines[3].contains(CARD_A));
    let columns: Vec<usize> =
        lines.iter().filter_map(|l| l.char_indices().nth(5).map(|(at, _)| at)).collect();
    assert!(columns.windows(2).all(|w| w[0] == w[1]));

    let json = ask(&at.path, &["list", "--kind", "Released", "-o", "json"]).await;
    let rows: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(rows[0]["seq"], 5);
    assert_eq!(rows[0]["event"]["code"], "PodFinished");
    let time = rows[0]["time"].as_str().unwrap();
    assert!(time.ends_with('Z') && time.parse::<Timestamp>().is_ok(), "{time}");

    let yaml = ask(&at.path, &["pod", "team/train", "--output", "yaml"]).await;
    assert!(yaml.out.contains("kind: Prepared"), "{}", yaml.out);

    let verify = ask(&at.path, &["verify"]).await;
    assert_eq!((verify.code, verify.out.starts_with("ok: 5 rows")), (Ok(0), true), "{}", verify.out);
    let head = verify.out.trim_end().rsplit(' ').next().unwrap();
    assert_eq!(ask(&at.path, &["verify", "--expect", head]).await.code, Ok(0));
    let other = format!("5:{}", "00".repeat(32));
    let broken = ask(&at.path, &["verify", "--expect", &other]).await;
    assert_eq!((broken.code, broken.out.starts_with("BROKEN")), (Ok(1), true), "{}", broken.out);
    let broken = ask(&at.path, &["verify", "--expect", &other, "-o", "json"]).await;
    let found: serde_json::Value = serde_json::from_str(&broken.out).unwrap();
    assert_eq!((&found["ok"], &found["findings"][0]["seq"]), (&false.into(), &5.into()));
}

#[tokio::test]
async fn who_had_is_answered_for_now_and_then() {
    let at = place();
    let log = open(&at.path).await;
    let devices = [crate::given::share(CARD_A, 3000)];
    log.append(crate::given::prepared("train", "main", &devices)).await.unwrap();
    let now = ask(&at.path, &["who-had", "--card", CARD_A]).await;
    assert!(now.out.contains("team/train") && now.out.contains("prepared"), "{}", now.out);
    let then =
        ask(&at.path, &["who-had", "--card", CARD_A, "--at", "2020-01-01T00:00:00Z", "-o", "json"]).await;
    assert_eq!((then.code, then.out.trim()), (Ok(3), "[]"));
    assert!(then.remarks.starts_with("nobody had GPU-aaaa"), "{}", then.remarks);
    let unknown = ask(&at.path, &["who-had", "--card", "GPU-typo"]).await;
    assert!(unknown.remarks.contains("has never seen card GPU-typo"), "{}", unknown.remarks);
    log.close().await;
}

#[tokio::test]
async fn nothing_found_is_said_and_a_cut_list_too() {
    let at = place();
    small_log(&at.path).await;
    let none = ask(&at.path, &["list", "--kind", "AuditGap"]).await;
    assert_eq!((none.code, none.out.as_str(), none.remarks.as_str()), (Ok(0), "", "no event matches\n"));
    let none = ask(&at.path, &["pod", "team/absent"]).await;
    assert_eq!(none.remarks, "no event of pod team/absent on this node\n");
    // A script sees it in every form of the output; by its index a card is not known.
    for output in ["table", "json", "yaml"] {
        for (words, remark) in [
            (["pod", "team/absent", "-o", output].as_slice(), "team/absent"),
            (["pod", "train", "-o", output].as_slice(), "by name it is NAMESPACE/NAME"),
            (["who-had", "--card", "0", "-o", output].as_slice(), "never seen card 0"),
        ] {
            let none = ask(&at.path, words).await;
            assert_eq!(none.code, Ok(3), "{words:?}");
            assert!(none.remarks.contains(remark), "{words:?}: {}", none.remarks);
        }
    }
    let help = Program::try_parse_from(["agent", "audit", "--help"]).err().unwrap().to_string();
    assert!(help.contains("3 `who-had` or `pod` found nothing"), "{help}");
    let cut = ask(&at.path, &["list", "--limit", "2"]).await;
    assert_eq!(cut.out.lines().count(), 3);
    assert!(cut.remarks.contains("--limit 0"), "{}", cut.remarks);
}

#[tokio::test]
async fn wrong_paths_and_values_are_named() {
    let at = place();
    let missing = ask(&at.path, &["list"]).await.code.unwrap_err();
    assert_eq!(missing.0, "AuditNotFound");
    assert!(missing.1.contains("audit.db"), "{}", missing.1);
    std::fs::write(&at.path, vec![7; 9000]).unwrap();
    assert_eq!(ask(&at.path, &["verify"]).await.code.unwrap_err().0, "AuditNotALog", "garbage");
    std::fs::write(&at.path, b"").unwrap();
    assert_eq!(ask(&at.path, &["verify"]).await.code.unwrap_err().0, "AuditNotALog", "empty");
    assert_eq!(
        ask(at.path.parent().unwrap(), &["verify"]).await.code.unwrap_err().0,
        "AuditNotALog",
        "a folder"
    );

    let at = place();
    small_log(&at.path).await;
    for (case, words) in [
        ("no offset", ["list", "--since", "2026-03-01 14:05"]),
        ("no time", ["list", "--until", "yesterday"]),
        ("no hash", ["verify", "--expect", "5"]),
    ] {
        let error = ask(&at.path, &words).await.code.unwrap_err();
        assert_eq!(error.0, "AuditArgument", "{case}");
        assert!(error.1.contains(words[1]) && error.1.contains(words[2]), "{case}: {}", error.1);
    }
    for pod in ["", "team/", "/train", "a/b/c"] {
        assert_eq!(ask(&at.path, &["pod", pod]).await.code.unwrap_err().0, "AuditArgument", "{pod}");
    }
}

#[tokio::test]
async fn control_characters_are_shown_and_not_obeyed() {
    let at = place();
    let log = open(&at.path).await;
    log.append(refused("\u{1b}[2Jgone\nSEQ forged")).await.unwrap();
    log.close().await;
    let list = ask(&at.path, &["list"]).await;
    assert_eq!(list.out.lines().count(), 2, "{}", list.out);
    assert!(!list.out.contains('\u{1b}') && list.out.contains("\\u{1b}[2Jgone\\nSEQ"), "{}", list.out);
}

#[tokio::test]
async fn a_card_is_known_by_the_beginning_of_its_uuid() {
    let at = place();
    small_log(&at.path).await;
    let whole = ask(&at.path, &["list", "--card", CARD_A]).await;
    let short = ask(&at.path, &["list", "--card", &CARD_A[..12]]).await;
    assert_eq!(short.code, Ok(0), "{:?}", short.code);
    assert_eq!(short.out, whole.out);
    assert!(short.out.contains("Prepared"), "{}", short.out);
    let none = ask(&at.path, &["who-had", "--card", "GPU-nobody"]).await;
    assert!(none.remarks.contains("never seen card GPU-nobody"), "{}", none.remarks);
    let kind =
        Program::try_parse_from(["agent", "audit", "list", "--kind", "Prepard"]).err().unwrap().to_string();
    assert!(kind.contains("Prepard") && kind.contains("PrepareRefused"), "{kind}");
}

#[test]
fn every_kind_is_listed_once() {
    let kinds: std::collections::BTreeSet<_> = mullion_audit::Event::KINDS.into_iter().collect();
    assert_eq!(kinds.len(), mullion_audit::Event::KINDS.len());
    // serde names every variant when it meets one that does not exist.
    let error =
        serde_json::from_str::<mullion_audit::Event>(r#"{"kind":"NoSuchKind"}"#).unwrap_err().to_string();
    let known: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
    assert_eq!(known, mullion_audit::Event::KINDS, "{error}");
}

/// A pod that was deleted and made again under its name is another one.
#[tokio::test]
async fn pods_of_one_name_are_told_apart_by_uid() {
    const UIDS: [&str; 2] = ["5a0c2f6e-1111-4000-8000-000000000001", "5a0d9b1c-2222-4000-8000-000000000002"];
    let at = place();
    let log = open(&at.path).await;
    for uid in UIDS {
        let mut event = prepared("train", "main", &[share(CARD_A, 3000)]);
        let Event::Prepared { pod, .. } = &mut event else { panic!("{event:?}") };
        uid.clone_into(&mut pod.uid);
        log.append(event).await.unwrap();
    }
    log.close().await;
    let both = ask(&at.path, &["pod", "team/train"]).await;
    let lines: Vec<&str> = both.out.lines().collect();
    assert!(lines[0].contains("  UID  "), "{}", both.out);
    assert!(lines[1].contains("  5a0c2f6e  ") && lines[2].contains("  5a0d9b1c  "), "{}", both.out);
    for asked in [UIDS[1], "5a0d9b1c", "5a0d"] {
        let one = ask(&at.path, &["pod", asked, "-o", "json"]).await;
        let rows: serde_json::Value = serde_json::from_str(&one.out).unwrap();
        assert_eq!((one.code, rows.as_array().unwrap().len()), (Ok(0), 1), "{asked}");
        assert_eq!(rows[0]["podUid"], UIDS[1], "{asked}");
    }
    let yaml = ask(&at.path, &["pod", UIDS[0], "-o", "yaml"]).await;
    assert!(yaml.out.contains(UIDS[0]) && !yaml.out.contains(UIDS[1]), "{}", yaml.out);
    let unclear = ask(&at.path, &["pod", "5a0"]).await.code.unwrap_err();
    assert_eq!(unclear.0, "AuditArgument");
    assert!(unclear.1.contains("give more of it"), "{}", unclear.1);
}

/// By the time that each state began, oldest first: the allocation's name says nothing of it.
#[tokio::test]
async fn who_had_shows_when_the_state_began_in_that_order() {
    let at = place();
    let hands = Hands::default();
    let clock = hands.clone();
    let log = AuditLog::open(Options::new(&at.path, "node-a"), move || clock.now()).await.unwrap();
    let cards = [share(CARD_A, 1000)];
    let app = || vec![crate::given::container("main", mullion_audit::ContainerKind::App, &cards)];
    for (time, event) in [
        ("14:00:00", reserved("zebra", app())),
        ("14:01:00", reserved("ant", app())),
        ("14:02:00", reserved("mole", app())),
        ("14:03:00", prepared("ant", "main", &cards)),
        ("14:05:00", prepared("zebra", "main", &cards)),
    ] {
        hands.set(&format!("2026-03-01T{time}Z"));
        log.append(event).await.unwrap();
    }
    log.close().await;
    let words = ["who-had", "--card", CARD_A, "--at", "2026-03-01T15:00:00Z"];
    let table = ask(&at.path, &words).await.out;
    let found: Vec<_> = table.lines().skip(1).map(|l| l.split_whitespace().collect::<Vec<_>>()).collect();
    let found: Vec<_> = found.iter().map(|l| (l[0], l[6], &l[7][11..19])).collect();
    let want = [
        ("team/mole", "reserved", "14:02:00"),
        ("team/ant", "prepared", "14:03:00"),
        ("team/zebra", "prepared", "14:05:00"),
    ];
    assert_eq!(found, want, "{table}");
}

#[tokio::test]
async fn notes_say_a_thing_once() {
    let at = place();
    let log = open(&at.path).await;
    for (xid, message) in [(Some(79), "XID 79"), (Some(7), "XID 79 and more"), (None, "lost")] {
        let message = message.to_owned();
        let event =
            Event::HealthChanged { card: CARD_A.to_owned(), state: CardState::Unhealthy, xid, message };
        log.append(event).await.unwrap();
    }
    for processes in [1, 2] {
        let event = Event::LimitBypassed {
            allocation: crate::given::allocation("train"),
            pod: crate::given::pod("train"),
            container: "main".to_owned(),
            card: CARD_A.to_owned(),
            held_mib: 2,
            accounted_mib: 1,
            limit_mib: 1,
            processes,
        };
        log.append(event).await.unwrap();
    }
    log.close().await;
    let list = ask(&at.path, &["list"]).await.out;
    let notes: Vec<&str> = list.lines().skip(1).map(|l| l.rsplit("  ").next().unwrap()).collect();
    let want = ["Unhealthy: XID 79", "Unhealthy, XID 7: XID 79 and more", "Unhealthy: lost"];
    assert_eq!(notes[..3], want, "{list}");
    assert!(notes[3].contains("held by 1 process,") && notes[4].contains("held by 2 processes,"), "{list}");
}
