use jiff::Timestamp;
use mullion_audit::{AuditLog, AuditReader, ContainerKind, Event, Filter, MigShare, Options, Share};

use crate::given::{
    CARD_A, CARD_B, Hands, Place, allocation, container, place, pod, prepared, refused, released, reserved,
    share,
};

const MIG: &str = "MIG-cccccccc-0000-4000-8000-000000000003";

/// One afternoon on a node with two cards.
async fn afternoon() -> Place {
    let at = place();
    let hands = Hands::default();
    let clock = hands.clone();
    let log = AuditLog::open(Options::new(&at.path, "node-a"), move || clock.now()).await.unwrap();
    let mig = Share {
        mig: Some(MigShare { uuid: Some(MIG.to_owned()), profile_id: 19, start: 0, size: 1 }),
        ..share(CARD_B, 9728)
    };
    let app = |cards: &[Share]| vec![container("main", ContainerKind::App, cards)];
    let voided = Event::AllocationVoided {
        allocation: allocation("loser"),
        pod: pod("loser"),
        code: "DoesNotFit".to_owned(),
        message: "an earlier allocation has the card".to_owned(),
    };
    let staged = vec![
        container("fetch", ContainerKind::Init, &[share(CARD_B, 500)]),
        container("main", ContainerKind::App, &[share(CARD_A, 1000)]),
    ];
    for (time, event) in [
        ("14:00:00", reserved("train", app(&[share(CARD_A, 3000)]))),
        ("14:01:00", prepared("train", "main", &[share(CARD_A, 3000)])),
        ("14:02:00", reserved("both", app(&[share(CARD_A, 2000), share(CARD_B, 2000)]))),
        ("14:03:00", reserved("loser", app(&[share(CARD_A, 90_000)]))),
        ("14:04:00", voided),
        ("14:05:00", released("train")),
        ("14:06:00", reserved("staged", staged)),
        ("14:07:00", Event::InitDone { allocation: allocation("staged"), pod: pod("staged") }),
        ("14:08:00", reserved("slice", app(&[mig]))),
        ("14:09:00", refused("later")),
        ("14:10:00", released("both")),
    ] {
        hands.set(&format!("2026-03-01T{time}Z"));
        log.append(event).await.unwrap();
    }
    log.close().await;
    at
}

fn time(text: &str) -> Timestamp {
    format!("2026-03-01T{text}Z").parse().unwrap()
}

#[tokio::test]
async fn who_had_a_card_at_a_time() {
    let at = afternoon().await;
    let mut reader = AuditReader::open(&at.path).await.unwrap();
    for (case, card, when, want) in [
        ("before anybody", CARD_A, "13:59:59", vec![]),
        ("from the reservation on", CARD_A, "14:00:00", vec!["train/main 3000 reserved"]),
        ("prepared", CARD_A, "14:01:30", vec!["train/main 3000 prepared"]),
        ("shared by two", CARD_A, "14:02:00", vec!["both/main 2000 reserved", "train/main 3000 prepared"]),
        (
            "the loser while it was thought to fit",
            CARD_A,
            "14:03:30",
            vec!["both/main 2000 reserved", "loser/main 90000 reserved", "train/main 3000 prepared"],
        ),
        ("the loser is out", CARD_A, "14:04:00", vec!["both/main 2000 reserved", "train/main 3000 prepared"]),
        ("released at that very second", CARD_A, "14:05:00", vec!["both/main 2000 reserved"]),
        ("the other card of two", CARD_B, "14:05:30", vec!["both/main 2000 reserved"]),
        (
            "an init container",
            CARD_B,
            "14:06:30",
            vec!["both/main 2000 reserved", "staged/fetch 500 reserved"],
        ),
        ("init containers have ended", CARD_B, "14:07:00", vec!["both/main 2000 reserved"]),
        (
            "its app container goes on",
            CARD_A,
            "14:07:00",
            vec!["both/main 2000 reserved", "staged/main 1000 reserved"],
        ),
        ("a MIG instance is on its card", CARD_B, "14:12:00", vec!["slice/main 9728 reserved"]),
        ("a MIG instance by its own name", MIG, "14:12:00", vec!["slice/main 9728 reserved"]),
        ("the end", CARD_A, "23:59:59", vec!["staged/main 1000 reserved"]),
        ("a card nobody knows", "GPU-unknown", "14:05:00", vec![]),
    ] {
        let holders = reader.who_had(card, time(when)).await.unwrap();
        let found: Vec<_> = holders
            .iter()
            .map(|h| {
                let state = if h.prepared.is_some() { "prepared" } else { "reserved" };
                format!("{}/{} {} {state}", h.pod.name, h.container, h.share.memory_mib)
            })
            .collect();
        assert_eq!(found, want, "{case}");
        // The short way through the indexes and the whole fold agree.
        let filter = Filter { until: Some(time(when)), ..Filter::default() };
        let whole = mullion_audit::replay(reader.list(&filter).await.unwrap()).unwrap();
        assert_eq!(holders, whole.holders(card), "{case}");
    }
}

#[tokio::test]
async fn filters_choose_rows() {
    let at = afternoon().await;
    let mut reader = AuditReader::open(&at.path).await.unwrap();
    let filter = Filter::default;
    let text = |text: &str| Some(text.to_owned());
    for (case, filter, want) in [
        ("all", filter(), (1..=11).collect()),
        ("since", Filter { since: Some(time("14:09:00")), ..filter() }, vec![10, 11]),
        ("until", Filter { until: Some(time("14:01:00")), ..filter() }, vec![1, 2]),
        ("kind", Filter { kind: text("Released"), ..filter() }, vec![6, 11]),
        ("pod", Filter { namespace: text("team"), pod: text("train"), ..filter() }, vec![1, 2, 6]),
        (
            "pod of another namespace",
            Filter { namespace: text("other"), pod: text("train"), ..filter() },
            vec![],
        ),
        ("card", Filter { card: text(CARD_B), ..filter() }, vec![3, 7, 9]),
        ("MIG instance", Filter { card: text(MIG), ..filter() }, vec![9]),
        ("the newest", Filter { limit: Some(2), ..filter() }, vec![10, 11]),
        ("hostile text", Filter { kind: text("x' OR '1'='1"), ..filter() }, vec![]),
    ] {
        let found: Vec<u64> = reader.list(&filter).await.unwrap().iter().map(|row| row.seq).collect();
        assert_eq!(found, want, "{case}");
    }
    let pod: Vec<_> = reader.pod("team", "both").await.unwrap().into_iter().map(|row| row.kind).collect();
    assert_eq!(pod, ["AllocationReserved", "Released"]);
}
