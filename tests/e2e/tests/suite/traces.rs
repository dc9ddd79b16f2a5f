//! One pod is one trace, across processes, with no header passed between them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use fake_otlp::Received;
use kube::ResourceExt;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

/// The lab is started with `--otlp-endpoint http://10.97.0.1:4317`; the receiver lives as long as this test.
#[tokio::test]
async fn a_pod_is_one_trace_from_admission_to_release() -> Result<()> {
    let scope = Scope::new("traces").await?;
    let received = Received::default();
    let listener =
        tokio::net::TcpListener::bind("10.97.0.1:4317").await.context("the lab's bridge address")?;
    let server = tokio::spawn(fake_otlp::receive(listener, received.clone()));
    scope.create(&slice_pod("traced", "500", "2").on("node-b")).await?;
    let made = scope.running("traced").await?;
    let uid = made.uid().context("no uid")?;
    scope.delete("traced").await?;
    let id = mullion_telemetry::trace_id(&uid).to_bytes().to_vec();
    let want = [
        ("mullion-controller", "webhook"),
        ("mullion-controller", "filter"),
        ("mullion-controller", "bind"),
        ("mullion-nodeagent", "prepare"),
        ("mullion-nodeagent", "release"),
    ];
    let seen = eventually("all spans of the pod in one trace", PATIENCE, || async {
        let spans: BTreeSet<(String, String)> = received
            .lock()
            .iter()
            .filter(|(_, span)| span.trace_id == id)
            .map(|(service, span)| (service.clone(), span.name.clone()))
            .collect();
        let missing: Vec<_> =
            want.iter().filter(|(s, n)| !spans.contains(&((*s).to_owned(), (*n).to_owned()))).collect();
        if missing.is_empty() { Ok(Some(())) } else { bail!("missing {missing:?} among {spans:?}") }
    })
    .await;
    server.abort();
    seen?;
    scope.remove().await
}
