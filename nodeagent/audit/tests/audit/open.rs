use std::path::Path;

use mullion_audit::{AuditReader, ContainerKind, Event};

use crate::given::{CARD_A, container, open, place, prepared, released, reserved, share};

async fn open_grants(path: &Path) -> Vec<String> {
    AuditReader::open(path).await.unwrap().open_grants().await.unwrap().into_keys().collect()
}

#[tokio::test]
async fn a_grant_is_open_until_it_is_filled_or_withdrawn() {
    let at = place();
    let log = open(&at.path).await;
    let filled = "0000000000000005";
    for grant in [filled, "000000000000000a", "000000000000000b"] {
        log.append(Event::GrantIssued { grant: grant.to_owned(), device_ids: Vec::new() }).await.unwrap();
    }
    // One row about no grant beside them, and one filled that was never issued by this log.
    log.append(reserved("train", vec![container("main", ContainerKind::App, &[share(CARD_A, 1)])]))
        .await
        .unwrap();
    log.append(prepared("eval", "main", &[share(CARD_A, 1)])).await.unwrap();
    assert_eq!(open_grants(&at.path).await, [filled, "000000000000000a", "000000000000000b"]);
    log.append(prepared("train", "main", &[share(CARD_A, 1)])).await.unwrap();
    let withdrawn = Event::GrantWithdrawn { grant: "000000000000000a".to_owned(), code: "Unused".to_owned() };
    log.append(withdrawn).await.unwrap();
    assert_eq!(open_grants(&at.path).await, ["000000000000000b"]);
    log.append(released("train")).await.unwrap();
    assert_eq!(open_grants(&at.path).await, ["000000000000000b"], "what was filled stays so");
    log.close().await;
}
