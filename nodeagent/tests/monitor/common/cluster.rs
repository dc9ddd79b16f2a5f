//! An API server that takes Events.

use std::convert::Infallible;

use axum::http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tower::service_fn;

/// A client of one, and the Events that it is sent.
pub fn cluster() -> (Client, UnboundedReceiver<Value>) {
    let (sent, said) = unbounded_channel();
    let service = service_fn(move |request: Request<Body>| {
        let sent = sent.clone();
        async move {
            let bytes = request.into_body().collect_bytes().await.unwrap();
            if let Ok(event) = serde_json::from_slice::<Value>(&bytes) {
                let _ = sent.send(event);
            }
            Ok::<_, Infallible>(Response::builder().status(201).body(Body::from(bytes.to_vec())).unwrap())
        }
    });
    (Client::new(service, "default"), said)
}

/// The reasons and notes of all Events that have come.
pub fn notes(said: &mut UnboundedReceiver<Value>) -> Vec<String> {
    std::iter::from_fn(|| said.try_recv().ok())
        .map(|event| format!("{}: {}", event["reason"].as_str().unwrap(), event["note"].as_str().unwrap()))
        .collect()
}
