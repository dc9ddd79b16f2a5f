//! Order statistics of small samples.

use std::time::Duration;

/// The value at `quantile` (0 to 1) by nearest rank; 0 for an empty sample.
pub fn quantile(sample: &[f64], quantile: f64) -> f64 {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let below = |rank: &usize| real(*rank) < quantile * real(sorted.len());
    let rank = (1..sorted.len()).take_while(below).count();
    sorted.get(rank).copied().unwrap_or(0.0)
}

/// The middle value, or the mean of the middle two; 0 for an empty sample.
pub fn median(sample: &[f64]) -> f64 {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.get(middle) {
        None => 0.0,
        Some(&high) if sorted.len() % 2 == 1 => high,
        Some(&high) => f64::midpoint(sorted[middle - 1], high),
    }
}

/// The arithmetic mean; 0 for an empty sample.
pub fn mean(sample: &[f64]) -> f64 {
    if sample.is_empty() { 0.0 } else { sample.iter().sum::<f64>() / real(sample.len()) }
}

/// A count as a real number; counts here are far below 2^32.
pub fn real(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Milliseconds.
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// `p50 / p90 / p99 / max` of durations in milliseconds, as table cells.
pub fn spread_cells(millis: &[f64]) -> [String; 4] {
    [0.5, 0.9, 0.99, 1.0].map(|q| format!("{:.0}", quantile(millis, q)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::float_cmp, reason = "the values are picked, not computed")]
    fn quantiles_are_members_of_the_sample() {
        let sample: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        for (case, q, want) in
            [("p50", 0.5, 50.0), ("p99", 0.99, 99.0), ("max", 1.0, 100.0), ("min", 0.0, 1.0)]
        {
            assert_eq!(quantile(&sample, q), want, "{case}");
        }
        assert_eq!(quantile(&[], 0.5), 0.0, "empty");
        assert_eq!(quantile(&[7.0], 0.99), 7.0, "one");
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
        assert_eq!(mean(&[1.0, 2.0]), 1.5);
    }
}
