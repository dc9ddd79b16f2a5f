use jiff::Timestamp;
use mullion_audit::{AuditReader, CardSeen, CardState, ContainerKind, Event, NodeLedger, Row, replay};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::given::{allocation, container, open, place, pod, prepared, refused, released, reserved, share};

fn name() -> impl Strategy<Value = String> {
    "[a-d]"
}

fn event() -> impl Strategy<Value = Event> {
    let card = || prop_oneof![Just("GPU-1"), Just("GPU-2")];
    let kind =
        || prop_oneof![Just(ContainerKind::Init), Just(ContainerKind::App), Just(ContainerKind::Sidecar)];
    let grant = || "[0-3]{1}".prop_map(|digit| digit.repeat(16));
    let slots = || vec("slot-000[0-9]", 1..3);
    prop_oneof![
        (name(), card(), kind(), 1..5000_u64).prop_map(|(n, card, kind, mib)| reserved(
            &n,
            vec![container("main", kind, &[share(card, mib)])]
        )),
        (name(), card(), 1..5000_u64).prop_map(|(n, card, mib)| prepared(&n, "main", &[share(card, mib)])),
        name().prop_map(|n| released(&n)),
        name().prop_map(|n| Event::InitDone { allocation: allocation(&n), pod: pod(&n) }),
        name().prop_map(|n| Event::AllocationVoided {
            allocation: allocation(&n),
            pod: pod(&n),
            code: "Void".to_owned(),
            message: String::new(),
        }),
        (grant(), slots()).prop_map(|(grant, device_ids)| Event::GrantIssued { grant, device_ids }),
        grant().prop_map(|grant| Event::GrantWithdrawn { grant, code: "Unused".to_owned() }),
        (card(), any::<bool>(), proptest::option::of(1..120_u64)).prop_map(|(card, up, xid)| {
            Event::HealthChanged {
                card: card.to_owned(),
                state: if up { CardState::Healthy } else { CardState::Unhealthy },
                xid,
                message: "seen".to_owned(),
            }
        }),
        (0..9_u64, card()).prop_map(|(observation, card)| Event::InventoryChanged {
            observation,
            driver_version: None,
            cards: vec![CardSeen { uuid: card.to_owned(), model: "H100".to_owned(), memory_mib: 81_559 }],
        }),
        "[ -~]{0,20}".prop_map(|text| refused(&text)),
    ]
}

fn step(ledger: &mut NodeLedger, place: usize, event: &Event) {
    let time = Timestamp::from_second(1_000_000 + i64::try_from(place).unwrap()).unwrap();
    ledger.apply(place as u64 + 1, time, event);
}

proptest! {
    #[test]
    fn events_survive_json(event in event()) {
        let text = serde_json::to_string(&event).unwrap();
        let tag = format!("\"kind\":\"{}\"", event.kind());
        prop_assert!(text.contains(&tag), "{}", text);
        prop_assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
    }

    #[test]
    fn a_ledger_does_not_depend_on_where_it_was_taken_up_again(events in vec(event(), 0..40), cut in 0..40_usize) {
        let mut whole = NodeLedger::default();
        for (i, event) in events.iter().enumerate() {
            step(&mut whole, i, event);
        }
        // A restart in between, with rows read twice.
        let mut parts = NodeLedger::default();
        let cut = cut.min(events.len());
        for (i, event) in events.iter().enumerate().take(cut) {
            step(&mut parts, i, event);
        }
        for (i, event) in events.iter().enumerate().skip(cut.saturating_sub(3)) {
            step(&mut parts, i, event);
        }
        prop_assert_eq!(&parts, &whole);
        for (uid, held) in &whole.allocations {
            let last = events.iter().rev().find(|e| e.allocation().is_some_and(|a| &a.uid == uid)).map(Event::kind);
            prop_assert!(!matches!(last, Some("Released" | "AllocationVoided")), "{} is gone", held.name);
        }
    }
}

/// The rows that a log gives back fold into the ledger that its writer had.
#[test]
fn rows_of_a_file_rebuild_the_ledger() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    proptest!(ProptestConfig::with_cases(8), |(events in vec(event(), 1..30))| {
        let (rows, whole, live): (Vec<Row>, NodeLedger, NodeLedger) = runtime.block_on(async {
            let at = place();
            let log = open(&at.path).await;
            let mut reader = AuditReader::open(&at.path).await.unwrap();
            let mut live = NodeLedger::default();
            for event in &events {
                let seq = log.append(event.clone()).await.unwrap();
                let time = reader.list(&mullion_audit::Filter { limit: Some(1), ..Default::default() })
                    .await.unwrap()[0].time;
                live.apply(seq, time, event);
            }
            log.close().await;
            (reader.list(&mullion_audit::Filter::default()).await.unwrap(), reader.replay().await.unwrap(), live)
        });
        prop_assert_eq!(&replay(&rows).unwrap(), &whole);
        prop_assert_eq!(&live, &whole);
    });
}

#[test]
fn a_row_of_a_newer_release_is_not_skipped() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut row = runtime.block_on(async {
        let at = place();
        crate::given::small_log(&at.path).await;
        crate::given::rows(&at.path).await.remove(0)
    });
    row.detail = r#"{"kind":"PrintedOnPaper","pages":3}"#.to_owned();
    row.kind = "PrintedOnPaper".to_owned();
    let error = replay([row]).unwrap_err();
    assert_eq!(error.code(), "AuditUnknownEvent");
    assert!(error.to_string().contains("PrintedOnPaper"), "{error}");
}

/// Logs may have rows that were written late: what is over stays over.
#[tokio::test]
async fn a_row_that_comes_after_the_end_brings_nothing_back() {
    let reserved = || reserved("p", vec![container("main", ContainerKind::App, &[share("GPU-1", 9)])]);
    let prepared = || prepared("p", "main", &[share("GPU-1", 9)]);
    let grant = || format!("{:0>16}", 1);
    let issued = || Event::GrantIssued { grant: grant(), device_ids: vec![] };
    let withdrawn = || Event::GrantWithdrawn { grant: grant(), code: "Unused".to_owned() };
    for (case, events) in [
        ("reserved", vec![released("p"), reserved()]),
        ("prepared", vec![reserved(), prepared(), released("p"), reserved(), prepared()]),
        ("issued and prepared", vec![reserved(), issued(), released("p"), prepared()]),
        ("issued after it was prepared", vec![reserved(), prepared(), issued(), released("p")]),
        ("issued after the release", vec![reserved(), prepared(), released("p"), issued()]),
        ("issued after it was withdrawn", vec![withdrawn(), issued()]),
    ] {
        let at = place();
        let log = open(&at.path).await;
        log.append_many(events.into_iter().map(Into::into).collect()).await.unwrap();
        log.close().await;
        let ledger = AuditReader::open(&at.path).await.unwrap().replay().await.unwrap();
        assert_eq!(ledger.holders("GPU-1"), [], "{case}");
        assert!(ledger.allocations.is_empty() && ledger.grants.is_empty(), "{case}");
    }
}
