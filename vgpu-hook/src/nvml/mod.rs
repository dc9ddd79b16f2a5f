//! NVML's view of a card, as large and as full as the container's slice is.
