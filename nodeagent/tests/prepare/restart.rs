//! Containers that start again: what they were given does not change, whatever has come to the node or left it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mullion_crds::vgpuallocation::Kind;
use mullion_nodeagent::config::Enforcement;
use serde_json::Value;

use crate::{Node, grant_name};

/// A small shared library of this machine, whichever it is: the loader's own maps show one.
fn some_library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_libc = |word: &&str| word.contains("/libc.so") || word.contains("/libc-");
    maps.split_whitespace().find(is_libc).unwrap().into()
}

/// With the library on the node a container gets exactly that file, whatever comes later.
#[tokio::test]
async fn a_container_gets_the_library_of_its_time() {
    let mut node = Node::new(true).await;
    node.settings.enforcement = Enforcement::Required;
    node.state.close().await;
    node.audit.close().await;
    let node = Node::start(node.root, node.settings, node.shared).await;
    let owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    node.checkpoint(&owners);
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("HookMissing"));
    std::fs::write(&node.settings.hook_library, "no library").unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("HookInvalid"));
    let libc = &some_library();
    std::fs::copy(libc, &node.settings.hook_library).unwrap();
    node.prepare(&["slot-0000"]).await.unwrap();
    let mounts = |spec: &Value| {
        let mounts = spec["devices"][0]["containerEdits"]["mounts"].as_array().unwrap().clone();
        let pair = |m: &Value| {
            let text = |key: &str| m[key].as_str().unwrap().to_owned();
            (text("containerPath"), text("hostPath"))
        };
        mounts.iter().map(pair).collect::<BTreeMap<_, _>>()
    };
    let first = mounts(&node.spec(&grant_name("pod-1", "main")));
    let library = &first["/usr/local/vgpu/libvgpu.so"];
    let place = node.settings.libraries_dir().display().to_string();
    assert!(library.starts_with(&place) && library.ends_with("/libvgpu.so"), "{library}");
    assert_eq!(std::fs::read(library).unwrap(), std::fs::read(libc).unwrap());
    let preload = std::fs::read_to_string(&first["/etc/ld.so.preload"]).unwrap();
    assert_eq!(preload, "/usr/local/vgpu/libvgpu.so\n");

    // An update: the container that restarts has what it had, the next one what is new.
    let mut newer = std::fs::read(libc).unwrap();
    newer.push(0);
    std::fs::write(&node.settings.hook_library, newer).unwrap();
    let mut owners = owners;
    owners.extend(node.pod("pod-2", &[("main", Kind::App, &["slot-0001"])], true));
    node.checkpoint(&owners);
    node.prepare(&["slot-0000"]).await.unwrap();
    node.prepare(&["slot-0001"]).await.unwrap();
    assert_eq!(mounts(&node.spec(&grant_name("pod-1", "main"))), first);
    let second = mounts(&node.spec(&grant_name("pod-2", "main")));
    assert_ne!(&second["/usr/local/vgpu/libvgpu.so"], library);
}

/// A grant's content never changes within a boot: with another card behind the name, the container does not start.
#[tokio::test]
async fn a_grant_that_would_change_is_refused() {
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    node.prepare(&["slot-0000"]).await.unwrap();
    let before = node.spec(&grant_name("pod-1", "main"));
    node.shared.change(|w| {
        let card = &mut w.cards.as_mut().unwrap().get_mut("GPU-0").unwrap().card;
        card.minor = 1;
    });
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("GrantChanged"));
    assert_eq!(node.spec(&grant_name("pod-1", "main")), before);
}

/// Where containers start without limits, it is kept why: no library is not the same as a bad one.
#[tokio::test]
async fn a_container_without_limits_has_the_reason_on_record() {
    let node = Node::new(true).await;
    let owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    node.checkpoint(&owners);
    let kept = |grants: Vec<mullion_nodeagent::state::Grant>| {
        let [grant] = grants.as_slice() else { panic!("{grants:?}") };
        let why = grant.unenforced.clone().unwrap();
        assert!(!grant.enforced && why.message.contains("without limits"), "{why:?}");
        why.code
    };
    node.prepare(&["slot-0000"]).await.unwrap();
    assert_eq!(kept(node.state.grants().await.unwrap()), "HookMissing");
    std::fs::write(&node.settings.hook_library, "no library").unwrap();
    node.prepare(&["slot-0000"]).await.unwrap();
    assert_eq!(kept(node.state.grants().await.unwrap()), "HookInvalid");
    assert_eq!(kept(node.shared.read(|w| w.grants.values().cloned().collect())), "HookInvalid");
    // The spec that it started with stays, so the library that comes now is not in it; and where limits are required,
    // it is no spec to start with.
    std::fs::copy(some_library(), &node.settings.hook_library).unwrap();
    node.prepare(&["slot-0000"]).await.unwrap();
    assert_eq!(kept(node.state.grants().await.unwrap()), "GrantWithoutLibrary");
    node.state.close().await;
    node.audit.close().await;
    let Node { root, mut settings, shared, .. } = node;
    settings.enforcement = Enforcement::Required;
    let node = Node::start(root, settings, shared).await;
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("GrantChanged"));
}

/// The other way round: a library that has left the node is still in what the container was given.
#[tokio::test]
async fn a_container_keeps_its_limits_when_the_library_leaves_the_node() {
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    std::fs::copy(some_library(), &node.settings.hook_library).unwrap();
    for _ in 0..2 {
        node.prepare(&["slot-0000"]).await.unwrap();
        let grants = node.state.grants().await.unwrap();
        assert!(grants[0].enforced && grants[0].unenforced.is_none(), "{grants:?}");
        let _ = std::fs::remove_file(&node.settings.hook_library);
    }
}

/// Pages, usage files and the preload file are made at each start: somebody else who tidies their folders (HAMi's monitor
/// does, an admin may) costs no pod its place.
#[tokio::test]
async fn what_the_agent_makes_itself_may_be_gone_when_a_container_starts_again() {
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    std::fs::copy(some_library(), &node.settings.hook_library).unwrap();
    node.prepare(&["slot-0000"]).await.unwrap();
    let grant = grant_name("pod-1", "main");
    let spec = node.spec(&grant);
    let files = [
        node.settings.pages_dir().join(&grant),
        node.settings.containers_dir().join("pod-1_main/usage.cache"),
        node.settings.preload(),
    ];
    let gone = [files[0].clone(), node.settings.containers_dir(), files[2].clone()];
    for gone in gone {
        if gone.is_dir() {
            std::fs::remove_dir_all(&gone).unwrap();
        } else {
            std::fs::remove_file(&gone).unwrap();
        }
        assert_eq!(node.prepare(&["slot-0000"]).await, Ok(()), "{gone:?}");
        assert!(files.iter().all(|file| file.exists()), "{gone:?}");
        assert_eq!(node.spec(&grant), spec, "{gone:?}");
    }
    // What is not made anew is missed: a file of the driver, say.
    std::fs::remove_dir_all(node.settings.libraries_dir()).unwrap();
    std::fs::remove_file(&node.settings.hook_library).unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("GrantChanged"));
}

/// Where limits are required, a container that has its library starts again with it, whatever lies on the node now.
#[tokio::test]
async fn required_limits_hold_by_the_library_that_a_container_has() {
    let mut node = Node::new(true).await;
    node.settings.enforcement = Enforcement::Required;
    node.state.close().await;
    node.audit.close().await;
    let node = Node::start(node.root, node.settings, node.shared).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    std::fs::copy(some_library(), &node.settings.hook_library).unwrap();
    node.prepare(&["slot-0000"]).await.unwrap();
    std::fs::write(&node.settings.hook_library, "half a library").unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Ok(()));
    let grants = node.state.grants().await.unwrap();
    assert!(grants[0].enforced && grants[0].unenforced.is_none(), "{grants:?}");
    // Without its own copy it waits for the node's: that is no reason to place it anew.
    std::fs::remove_dir_all(node.settings.libraries_dir()).unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("HookInvalid"));
    std::fs::copy(some_library(), &node.settings.hook_library).unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Ok(()));
}
