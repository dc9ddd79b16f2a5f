//! Wishes about compute that cannot be read. The webhook refuses them, so their pod came around it (it was created while
//! the webhook was away, or in a namespace that is exempt): it runs by the defaults, and its owner is told.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mullion_core::facts::PodRef;
use tracing::warn;

use crate::events::Announcer;
use crate::state::{Key, State};
use crate::world::{Misread, Shared, World};

/// Pause between two looks: much else rings the bell.
const LULL: Duration = Duration::from_secs(1);

/// A container that was told of: uid of its pod, its name, the code.
type Told = BTreeSet<(String, String, String)>;

/// What is to be said of containers that were given a slice, each once; `told` forgets those that are gone.
fn untold(world: &World, told: &mut Told) -> Vec<(PodRef, Misread)> {
    told.retain(|(pod, container, _)| {
        world.grants.values().any(|g| g.pod == *pod && g.container == *container)
    });
    let mut news = Vec::new();
    for grant in world.grants.values() {
        let uid = grant.pod.as_str().into();
        let Some(seen) = world.pods.as_ref().and_then(|pods| pods.get(&uid)) else { continue };
        for misread in seen.misread.iter().filter(|m| m.container == grant.container) {
            if told.insert((grant.pod.clone(), grant.container.clone(), misread.code.to_owned())) {
                let pod =
                    PodRef { namespace: seen.namespace.clone(), name: seen.name.clone(), uid: uid.clone() };
                news.push((pod, misread.clone()));
            }
        }
    }
    news
}

/// Tells of each in the log and by an Event on its pod, until dropped.
pub async fn keep_told(shared: Arc<Shared>, state: State, announcer: Announcer) {
    let say = |pod: &PodRef, misread: &Misread| {
        let (code, error) = (misread.code, &misread.message);
        warn!(
            namespace = pod.namespace,
            pod = pod.name,
            container = misread.container,
            code,
            error,
            "wish not read"
        );
        announcer.wish(pod, code, error);
    };
    tell(&shared, &state, say).await;
}

/// Says each once, also over restarts.
async fn tell(shared: &Shared, state: &State, mut say: impl FnMut(&PodRef, &Misread)) {
    let mut bell = shared.bell();
    let kept = state.get::<Told>(Key::MisreadTold).await.unwrap_or_else(|error| {
        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "who was told is not known");
        None
    });
    let mut kept = kept.unwrap_or_default();
    let mut told = kept.clone();
    loop {
        bell.borrow_and_update();
        for (pod, misread) in shared.read(|world| untold(world, &mut told)) {
            say(&pod, &misread);
        }
        if told != kept {
            match state.put(Key::MisreadTold, &told).await {
                Ok(()) => kept.clone_from(&told),
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "who was told is not kept");
                }
            }
        }
        if bell.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(LULL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Grant;
    use crate::world::PodSeen;
    use std::collections::BTreeMap;

    #[test]
    fn each_wish_that_cannot_be_read_is_told_once_and_only_of_containers_with_a_slice() {
        let misread = |container: &str, code| Misread {
            container: container.to_owned(),
            code,
            message: "what is wrong".to_owned(),
        };
        let seen = PodSeen {
            namespace: "team".to_owned(),
            name: "p".to_owned(),
            misread: vec![
                misread("main", "MalformedPriority"),
                misread("main", "UnknownCorePolicy"),
                misread("beside", "MalformedPriority"),
            ],
            ..PodSeen::default()
        };
        let mut world = World { pods: Some(BTreeMap::from([("uid".into(), seen)])), ..World::default() };
        let mut told = Told::new();
        assert!(untold(&world, &mut told).is_empty(), "it has no slice yet");
        let grant = Grant {
            grant: "g".to_owned(),
            allocation: "a".to_owned(),
            pod: "uid".to_owned(),
            container: "main".to_owned(),
            device_ids: Vec::new(),
            enforced: true,
            unenforced: None,
        };
        world.grants.insert("g".to_owned(), grant.clone());
        let codes = |news: Vec<(PodRef, Misread)>| -> Vec<_> {
            news.into_iter().map(|(pod, misread)| (pod.name, misread.container, misread.code)).collect()
        };
        let of = |code| ("p".to_owned(), "main".to_owned(), code);
        let want = [of("MalformedPriority"), of("UnknownCorePolicy")];
        assert_eq!(codes(untold(&world, &mut told)), want);
        assert!(untold(&world, &mut told).is_empty(), "once");
        world.grants.clear();
        assert!(untold(&world, &mut told).is_empty() && told.is_empty(), "gone");
        world.grants.insert("g".to_owned(), grant);
        world.pods = None;
        assert!(untold(&world, &mut told).is_empty(), "pods are not known yet");
    }

    fn misread(container: &str) -> PodSeen {
        let misread = Misread {
            container: container.to_owned(),
            code: "MalformedPriority",
            message: "what is wrong".to_owned(),
        };
        PodSeen { name: container.to_owned(), misread: vec![misread], ..PodSeen::default() }
    }

    fn granted(container: &str) -> (String, Grant) {
        let grant = Grant {
            grant: container.to_owned(),
            allocation: "a".to_owned(),
            pod: format!("uid-of-{container}"),
            container: container.to_owned(),
            device_ids: Vec::new(),
            enforced: true,
            unenforced: None,
        };
        (grant.grant.clone(), grant)
    }

    #[tokio::test]
    async fn who_was_told_is_not_told_again_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let state = State::open(&folder.path().join("state.db")).await.unwrap();
        let (said, mut heard) = tokio::sync::mpsc::unbounded_channel();
        let say = |pod: &PodRef, _: &Misread| said.send(pod.name.clone()).unwrap();
        let world = |grants: &[&str]| World {
            pods: Some(["one", "two"].map(|n| (format!("uid-of-{n}").as_str().into(), misread(n))).into()),
            grants: grants.iter().copied().map(granted).collect(),
            ..World::default()
        };
        let shared = Shared::new(world(&["one"]));
        tokio::select! {
            () = tell(&shared, &state, say) => {}
            () = async {
                assert_eq!(heard.recv().await.unwrap(), "one");
                shared.change(|w| w.grants.extend([granted("two")]));
                assert_eq!(heard.recv().await.unwrap(), "two");
                while state.get::<Told>(Key::MisreadTold).await.unwrap().is_none_or(|told| told.len() < 2) {
                    tokio::task::yield_now().await;
                }
            } => {}
        }
        let shared = Shared::new(world(&["one", "two"]));
        tokio::select! {
            () = tell(&shared, &state, say) => {}
            () = tokio::time::sleep(LULL / 2) => {}
        }
        assert!(heard.try_recv().is_err());
    }
}
