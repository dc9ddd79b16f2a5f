//! How a container wants its share of compute to be held: HAMi's two environment variables.
//!
//! They stay in the container's environment, where nobody reads them: a tenant can change it. The node's agent reads
//! them from the pod, which only who may write pods can.

use super::quantity::shown;
use super::{ContainerView, RequestError};

/// When the share holds: `default` or `force`, in any case of letters (HAMi's variable).
pub const CORE_POLICY: &str = "GPU_CORE_UTILIZATION_POLICY";
/// Who waits for whom on a card: 0 is the most urgent (HAMi's variable).
pub const TASK_PRIORITY: &str = "CUDA_TASK_PRIORITY";

/// Stands for a value that comes from elsewhere.
const FROM_ELSEWHERE: &str = "(valueFrom)";

/// How a container wants its share of compute to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeWishes {
    /// Hold it to its share also while it is alone on a card.
    pub force: bool,
    /// Smaller is more urgent; 0 or more.
    pub priority: i32,
}

impl Default for ComputeWishes {
    /// HAMi's: only beside others; priority 1.
    fn default() -> Self {
        Self { force: false, priority: 1 }
    }
}

/// Reads both variables.
///
/// # Errors
/// [`RequestError::CoreLimitLifted`] for `disable`: a limit that its own container lifts is none;
/// [`RequestError::UnknownCorePolicy`] and [`RequestError::MalformedPriority`] for what is no value, or is not written
/// in the pod itself.
pub fn compute_wishes(container: &ContainerView) -> Result<ComputeWishes, RequestError> {
    Ok(ComputeWishes { force: force(container)?, priority: priority(container)? })
}

/// Reads both variables of a container that is there already: what is wrong with one of them does not cost the other,
/// and stands for the default, which is the stricter or the more modest.
#[must_use]
pub fn compute_wishes_as_far_as_read(container: &ContainerView) -> (ComputeWishes, Vec<RequestError>) {
    let (mut wishes, mut wrong) = (ComputeWishes::default(), Vec::new());
    match force(container) {
        Ok(force) => wishes.force = force,
        Err(error) => wrong.push(error),
    }
    match priority(container) {
        Ok(priority) => wishes.priority = priority,
        Err(error) => wrong.push(error),
    }
    (wishes, wrong)
}

fn force(container: &ContainerView) -> Result<bool, RequestError> {
    let name = || shown(&container.name);
    match value(container, CORE_POLICY) {
        None => Ok(false),
        Some(word) if word.eq_ignore_ascii_case("force") => Ok(true),
        Some(word) if word.is_empty() || word.eq_ignore_ascii_case("default") => Ok(false),
        Some(word) if word.eq_ignore_ascii_case("disable") => {
            Err(RequestError::CoreLimitLifted { container: name() })
        }
        Some(word) => Err(RequestError::UnknownCorePolicy { container: name(), value: shown(word) }),
    }
}

fn priority(container: &ContainerView) -> Result<i32, RequestError> {
    let Some(text) = value(container, TASK_PRIORITY) else { return Ok(ComputeWishes::default().priority) };
    let read = text.parse().ok().filter(|priority: &i32| *priority >= 0);
    read.ok_or_else(|| RequestError::MalformedPriority {
        container: shown(&container.name),
        value: shown(text),
    })
}

fn value<'a>(container: &'a ContainerView, key: &str) -> Option<&'a str> {
    container.env.get(key).map(|v| v.as_deref().unwrap_or(FROM_ELSEWHERE))
}
