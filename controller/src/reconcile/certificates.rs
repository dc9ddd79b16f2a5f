//! Makes and renews the webhook's certificate and puts its CA into the webhook configuration, one step at a time.

use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch as JsonPatch, PatchOperation, TestOperation};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use mullion_crds::names::CONTROLLER_MANAGER;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Context;
use crate::error::Error;
use crate::webhook::certificate::{Held, Rules, Step, make, plan, prepare, promote, prune};

/// Pause after a step that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Longest pause: clocks jump.
const LONGEST: Duration = Duration::from_hours(1);

/// What is seen of an object: nothing yet, or that it is there or not.
pub type Seen<K> = Option<Option<K>>;

/// Secret and CA bundle as they stand.
type State = (Option<Held>, Option<Vec<u8>>);

/// Follows one object until `stop`.
pub async fn follow<K>(api: Api<K>, name: String, seen: watch::Sender<Seen<K>>, stop: CancellationToken)
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + Send
        + Sync
        + serde::de::DeserializeOwned
        + 'static,
{
    let stream = watcher::watch_object(api, &name)
        .backoff(crate::store::Resume::default())
        .take_until(stop.cancelled_owned());
    let mut stream = std::pin::pin!(stream);
    while let Some(event) = stream.next().await {
        match event {
            Ok(object) => {
                seen.send_replace(Some(object));
            }
            Err(error) => {
                let error = mullion_telemetry::source_chain(&error);
                tracing::warn!(name, error, "watch broke, resuming");
            }
        }
    }
}

/// The CA bundle that the API servers use: that of all webhooks, or nothing sensible where they differ; `None` where
/// there is no webhook to give one to.
fn injected(configuration: &MutatingWebhookConfiguration) -> Option<Vec<u8>> {
    let webhooks = configuration.webhooks.as_deref().filter(|webhooks| !webhooks.is_empty())?;
    let bundles = webhooks.iter().map(|w| w.client_config.ca_bundle.as_ref().map(|b| b.0.as_slice()));
    let mut all: Vec<&[u8]> = bundles.map(Option::unwrap_or_default).collect();
    all.dedup();
    Some(if let [one] = all.as_slice() { one.to_vec() } else { Vec::new() })
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    let config = &context.config;
    let rules = Rules {
        names: config.webhook_names(),
        lifetime: Duration::from_secs(config.webhook.certificate_seconds),
        trust: config.trust(),
    };
    let client = context.cluster.client();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &config.namespace);
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(client);
    let (secret_seen, secret) = watch::channel(None);
    let (configuration_seen, configuration) = watch::channel(None);
    let names = (config.webhook.secret.clone(), config.webhook.configuration.clone());
    tokio::join!(
        follow(secrets.clone(), names.0, secret_seen, stop.clone()),
        follow(configurations.clone(), names.1, configuration_seen, stop.clone()),
        async {
            let keeper = Keeper { context, rules, secrets, configurations };
            tokio::select! {
                () = stop.cancelled() => {}
                () = keeper.keep(secret, configuration) => {}
            }
        },
    );
}

struct Keeper<'a> {
    context: &'a Context,
    rules: Rules,
    secrets: Api<Secret>,
    configurations: Api<MutatingWebhookConfiguration>,
}

impl Keeper<'_> {
    /// Takes one step after another, for as long as it is polled.
    async fn keep(
        &self,
        mut secret: watch::Receiver<Seen<Secret>>,
        mut configuration: watch::Receiver<Seen<MutatingWebhookConfiguration>>,
    ) {
        let mut steady: Option<(State, Instant)> = None;
        loop {
            let seen = (secret.borrow_and_update().clone(), configuration.borrow_and_update().clone());
            let mut wait = LONGEST;
            if let (Some(secret), Some(configuration)) = seen {
                let held = secret.as_ref().map(Held::read);
                let bundle = configuration.as_ref().and_then(injected);
                let state = (held.clone(), bundle.clone());
                let since = match &steady {
                    Some((before, since)) if *before == state => *since,
                    _ => Instant::now(),
                };
                steady = Some((state, since));
                let now = Timestamp::now().as_second();
                match plan(&self.rules, held.as_ref(), bundle.as_deref(), since.elapsed(), now) {
                    Step::Wait(time) => wait = time.min(LONGEST),
                    step => {
                        let result = self
                            .step(step, secret.as_ref(), configuration.as_ref(), held.as_ref(), now)
                            .await;
                        self.context.note("certificate", &self.context.config.webhook.secret, &result);
                        if result.is_ok() {
                            tracing::info!(?step, "certificate step done");
                        }
                        // The watches bring what was written; a lost race brings what the winner wrote.
                        wait = PAUSE;
                    }
                }
            }
            tokio::select! {
                Ok(()) = secret.changed() => {}
                Ok(()) = configuration.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn step(
        &self,
        step: Step,
        secret: Option<&Secret>,
        configuration: Option<&MutatingWebhookConfiguration>,
        held: Option<&Held>,
        now: i64,
    ) -> Result<(), Error> {
        let empty = Held::default();
        let held = held.unwrap_or(&empty);
        let next = match step {
            Step::Wait(_) => return Ok(()),
            Step::Inject => {
                return match configuration {
                    Some(configuration) => self.inject(configuration, &held.ca).await,
                    None => Ok(()),
                };
            }
            Step::Make => make(&self.rules, now)?,
            Step::Prepare => prepare(&self.rules, held, now)?,
            Step::Promote => promote(held),
            Step::Prune => prune(held),
        };
        self.write(secret, &next).await
    }

    async fn write(&self, secret: Option<&Secret>, held: &Held) -> Result<(), Error> {
        let name = self.context.config.webhook.secret.as_str();
        let params =
            PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        let object = || format!("secret {}/{name}", self.context.config.namespace);
        let cluster = &self.context.cluster;
        let written = match secret {
            None => {
                let fresh = Secret {
                    metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
                    type_: Some("kubernetes.io/tls".to_owned()),
                    data: Some(held.data()),
                    ..Secret::default()
                };
                cluster.call("POST", object, self.secrets.create(&params, &fresh)).await
            }
            Some(known) => {
                // It carries the version that was judged.
                let changed = Secret { data: Some(held.data()), ..known.clone() };
                cluster.call("PUT", object, self.secrets.replace(name, &params, &changed)).await
            }
        };
        match written {
            Ok(_) => Ok(()),
            // Another replica was first: its certificate is as good.
            Err(error) if error.status().is_some_and(|s| s.is_already_exists() || s.is_conflict()) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn inject(&self, configuration: &MutatingWebhookConfiguration, ca: &[u8]) -> Result<(), Error> {
        let patch = Patch::<()>::Json(bundle_patch(configuration, ca));
        let name = configuration.name_any();
        let params =
            PatchParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PatchParams::default() };
        let object = || format!("mutatingwebhookconfiguration {name}");
        let work = self.configurations.patch(&name, &params, &patch);
        self.context.cluster.call("PATCH", object, work).await.map(|_| ())
    }
}

/// Sets the bundle of every webhook, if they still stand where they stood.
fn bundle_patch(configuration: &MutatingWebhookConfiguration, ca: &[u8]) -> JsonPatch {
    let bundle = json!(ByteString(ca.to_vec()));
    let webhooks = configuration.webhooks.as_deref().unwrap_or_default();
    let operations = webhooks.iter().enumerate().flat_map(|(index, webhook)| {
        let index = index.to_string();
        let name = PointerBuf::from_tokens(["webhooks", &index, "name"]);
        let path = PointerBuf::from_tokens(["webhooks", &index, "clientConfig", "caBundle"]);
        [
            PatchOperation::Test(TestOperation { path: name, value: json!(webhook.name) }),
            PatchOperation::Add(AddOperation { path, value: bundle.clone() }),
        ]
    });
    JsonPatch(operations.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn bundles_of_all_webhooks() {
        let configuration = |bundles: &[Option<&str>]| -> MutatingWebhookConfiguration {
            let webhooks: Vec<Value> = bundles
                .iter()
                .enumerate()
                .map(|(i, bundle)| {
                    let mut client = json!({"url": "https://x"});
                    if let Some(bundle) = bundle {
                        client["caBundle"] = json!(ByteString(bundle.as_bytes().to_vec()));
                    }
                    json!({"name": format!("w{i}"), "clientConfig": client, "sideEffects": "None",
                        "admissionReviewVersions": ["v1"]})
                })
                .collect();
            serde_json::from_value(json!({"metadata": {"name": "mullion"}, "webhooks": webhooks})).unwrap()
        };
        for (case, bundles, want) in [
            ("no webhook: nothing to write to, for ever", vec![], None),
            ("absent", vec![None], Some("")),
            ("one", vec![Some("a")], Some("a")),
            ("alike", vec![Some("a"), Some("a")], Some("a")),
            ("different", vec![Some("a"), Some("b")], Some("")),
            ("one missing", vec![Some("a"), None], Some("")),
        ] {
            assert_eq!(injected(&configuration(&bundles)), want.map(|w| w.as_bytes().to_vec()), "{case}");
        }
        let before = configuration(&[None, Some("old")]);
        let mut value = serde_json::to_value(&before).unwrap();
        json_patch::patch(&mut value, &bundle_patch(&before, b"new")).unwrap();
        let after: MutatingWebhookConfiguration = serde_json::from_value(value).unwrap();
        assert_eq!(injected(&after).as_deref(), Some(&b"new"[..]));
        let moved = configuration(&[]);
        let mut value = serde_json::to_value(&moved).unwrap();
        assert!(json_patch::patch(&mut value, &bundle_patch(&before, b"new")).is_err());
    }
}
