//! A small API server in this process: pods, allocations, Nodes, with faults on demand and a record of what was asked.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use http::{Method, Request, Response, StatusCode};
use kube::Client;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tower::service_fn;

use crate::cluster::Cluster;

/// What goes wrong with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not done, and the answer is this status.
    Refuse(u16),
    /// It is done, and the answer is this status.
    DoneBut(u16),
    /// It is done, and no answer comes.
    DoneAndSilent,
    /// It is not done, and no answer comes.
    Silent,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Value>,
    faults: VecDeque<(String, Fault)>,
    calls: Vec<String>,
    events: Vec<String>,
    version: u64,
}

/// Handle to the server: what is in it, what was asked of it.
#[derive(Clone, Debug, Default)]
pub struct FakeApi {
    state: Arc<Mutex<State>>,
}

impl FakeApi {
    /// A cluster client for it. What waits for one that is silent needs the paused clock, which a deadline costs no time.
    pub fn cluster(&self) -> Cluster {
        Cluster::new(self.client(), "test")
    }

    /// A client for it.
    pub fn client(&self) -> Client {
        let fake = self.clone();
        let service = service_fn(move |request: Request<kube::client::Body>| {
            let fake = fake.clone();
            async move { Ok::<_, Infallible>(fake.serve(request).await) }
        });
        Client::new(service, "default")
    }

    /// Puts an object under its path, such as `pods/ns/a`, `nodes/n`.
    pub fn put(&self, path: &str, mut object: Value) {
        let mut state = self.state.lock();
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        state.objects.insert(path.to_owned(), object);
    }

    /// Takes an object away.
    pub fn remove(&self, path: &str) {
        self.state.lock().objects.remove(path);
    }

    /// The object under a path.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.state.lock().objects.get(path).cloned()
    }

    /// The next call whose line begins with `call` (such as `POST pods/ns/a/binding`) goes wrong.
    pub fn fail(&self, call: &str, fault: Fault) {
        self.state.lock().faults.push_back((call.to_owned(), fault));
    }

    /// Every call so far, Events left out, and forgets them.
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().calls)
    }

    /// What the Events say that were written so far.
    pub fn events(&self) -> Vec<String> {
        self.state.lock().events.clone()
    }

    async fn serve(&self, request: Request<kube::client::Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let path = short(head.uri.path());
        let line = format!("{} {path}", head.method);
        let query = head.uri.query().unwrap_or_default().to_owned();
        if path.starts_with("events/") {
            let bytes = body.collect_bytes().await.unwrap_or_default();
            let event: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            self.state.lock().events.push(event["note"].as_str().unwrap_or_default().to_owned());
            return answer(StatusCode::CREATED, &json!({"metadata": {"name": "e"}, "eventTime": null}));
        }
        let bytes = body.collect_bytes().await.unwrap_or_default();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let fault = {
            let mut state = self.state.lock();
            state.calls.push(line.clone());
            let hit = state.faults.iter().position(|(call, _)| line.starts_with(call.as_str()));
            hit.and_then(|at| state.faults.remove(at)).map(|(_, fault)| fault)
        };
        match fault {
            None => self.act(&head.method, &path, &query, body),
            Some(Fault::Refuse(code)) => failure(code, "InjectedFault"),
            Some(Fault::DoneBut(code)) => {
                self.act(&head.method, &path, &query, body);
                failure(code, "InjectedFault")
            }
            Some(Fault::DoneAndSilent) => {
                self.act(&head.method, &path, &query, body);
                std::future::pending().await
            }
            Some(Fault::Silent) => std::future::pending().await,
        }
    }

    fn act(&self, method: &Method, path: &str, query: &str, body: Value) -> Response<Body> {
        let mut state = self.state.lock();
        if let Some(pod) = path.strip_suffix("/binding") {
            return state.bind(pod, &body);
        }
        if let Some(pod) = path.strip_suffix("/eviction") {
            return match state.objects.remove(pod) {
                Some(_) => {
                    answer(StatusCode::CREATED, &json!({"kind": "Status", "status": "Success", "code": 201}))
                }
                None => failure(404, "NotFound"),
            };
        }
        match method.as_str() {
            "GET" => match state.objects.get(path) {
                Some(object) => answer(StatusCode::OK, object),
                None if path == "vgpuallocations" => state.list(path, query),
                None => failure(404, "NotFound"),
            },
            "POST" => state.create(path, body),
            "PUT" | "PATCH" => state.change(path.trim_end_matches("/status"), &body, method == Method::PUT),
            "DELETE" => state.delete(path, &body),
            _ => failure(405, "MethodNotAllowed"),
        }
    }
}

impl State {
    fn bind(&mut self, pod: &str, body: &Value) -> Response<Body> {
        let Some(object) = self.objects.get_mut(pod) else { return failure(404, "NotFound") };
        if object["metadata"]["uid"] != body["metadata"]["uid"] || !object["spec"]["nodeName"].is_null() {
            return failure(409, "Conflict");
        }
        object["spec"]["nodeName"] = body["target"]["name"].clone();
        answer(
            StatusCode::CREATED,
            &json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}),
        )
    }

    /// All objects of a collection whose `spec.nodeName` is the one that the field selector ends in.
    fn list(&self, collection: &str, query: &str) -> Response<Body> {
        let of_it = |(path, _): &(&String, &Value)| path.starts_with(&format!("{collection}/"));
        let on_node = |object: &&Value| query.ends_with(object["spec"]["nodeName"].as_str().unwrap_or("?"));
        let items: Vec<&Value> =
            self.objects.iter().filter(of_it).map(|(_, object)| object).filter(on_node).collect();
        let version = json!({"resourceVersion": self.version.to_string()});
        answer(StatusCode::OK, &json!({"metadata": version, "items": items}))
    }

    fn create(&mut self, collection: &str, mut body: Value) -> Response<Body> {
        let path = format!("{collection}/{}", body["metadata"]["name"].as_str().unwrap_or_default());
        if self.objects.contains_key(&path) {
            return failure(409, "AlreadyExists");
        }
        self.version += 1;
        body["metadata"]["uid"] = json!(format!("uid-{}", self.version));
        body["metadata"]["resourceVersion"] = json!(self.version.to_string());
        body["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        self.objects.insert(path, body.clone());
        answer(StatusCode::CREATED, &body)
    }

    fn change(&mut self, path: &str, body: &Value, whole: bool) -> Response<Body> {
        let version = self.version + 1;
        let Some(object) = self.objects.get_mut(path) else { return failure(404, "NotFound") };
        for key in ["uid", "resourceVersion"] {
            let wanted = &body["metadata"][key];
            if !wanted.is_null() && *wanted != object["metadata"][key] {
                return failure(409, "Conflict");
            }
        }
        if whole {
            *object = body.clone();
        } else {
            merge(object, body);
        }
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let answered = object.clone();
        self.version = version;
        let held = answered["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        if !answered["metadata"]["deletionTimestamp"].is_null() && !held {
            self.objects.remove(path);
        }
        answer(StatusCode::OK, &answered)
    }

    fn delete(&mut self, path: &str, body: &Value) -> Response<Body> {
        let Some(object) = self.objects.get_mut(path) else { return failure(404, "NotFound") };
        for key in ["uid", "resourceVersion"] {
            let wanted = &body["preconditions"][key];
            if !wanted.is_null() && *wanted != object["metadata"][key] {
                return failure(409, "Conflict");
            }
        }
        if object["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty()) {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            return answer(StatusCode::OK, object);
        }
        self.objects.remove(path);
        answer(StatusCode::OK, &json!({"kind": "Status", "status": "Success", "code": 200}))
    }
}

/// `/api/v1/namespaces/ns/pods/a/binding` -> `pods/ns/a/binding`.
fn short(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let skip = if parts.first() == Some(&"api") { 2 } else { 3 };
    match parts.get(skip..).unwrap_or_default() {
        ["namespaces", namespace, kind, rest @ ..] => [&[*kind, *namespace], rest].concat().join("/"),
        rest => rest.join("/"),
    }
}

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            into.as_object_mut().map(|object| object.remove(key));
        } else {
            merge(&mut into[key.as_str()], value);
        }
    }
}

fn failure(code: u16, reason: &str) -> Response<Body> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": format!("{reason} by the fake")});
    answer(StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &status)
}

fn answer(code: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = code;
    response
}
