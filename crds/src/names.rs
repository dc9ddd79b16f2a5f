//! Names that more than one program uses. Each is part of the public contract: never change one.

/// API group of the three kinds.
pub const GROUP: &str = "mullion.io";
/// Namespace of an installation.
pub const NAMESPACE: &str = "mullion-system";
/// Scheduler name that pods with our resources get.
pub const SCHEDULER: &str = "mullion-scheduler";
/// Finalizer of a `VGPUAllocation`: removed by whoever proved the release.
pub const FINALIZER: &str = "mullion.io/release";
/// Field manager of the controller's writes.
pub const CONTROLLER_MANAGER: &str = "mullion-controller";
/// Field manager of the agents' writes.
pub const AGENT_MANAGER: &str = "mullion-nodeagent";
/// Annotation that the controller changes to wake a waiting pod; nobody reads its value.
pub const POKE_ANNOTATION: &str = "mullion.io/poke";
/// Annotation of an allocation that the controller changes before it binds a pod to one that was there already; nobody
/// reads its value. The new version of the object is the point: whoever is about to undo the old one is refused.
pub const TAKEN_UP_ANNOTATION: &str = "mullion.io/taken-up-from";
/// Labels of a namespace that take its pods out of the webhook: ours and HAMi's, with the value [`OPT_OUT`].
pub const OPT_OUT_LABELS: [&str; 2] = ["mullion.io/webhook", "hami.io/webhook"];
/// Value of [`OPT_OUT_LABELS`].
pub const OPT_OUT: &str = "ignore";
/// Kind of the CDI devices that containers are granted.
pub const GRANT_KIND: &str = "mullion.io/grant";
