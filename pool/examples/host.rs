//! A training loop in miniature on a pool of host memory: `cargo run -p xlaunch-pool --example host`.

#![expect(clippy::print_stdout, reason = "the output of the example")]

use xlaunch_pool::{Mode, Pool, PoolError, tag};

fn main() -> Result<(), PoolError> {
    // `Mode::Plan` serves repeated steps from a plan. `Mode::On` allocates every buffer by best fit.
    let pool = Pool::host(Mode::Plan);

    // Long-lived buffers are placed at one end of the address range, those of a step at the other.
    let weights = pool.persistent().alloc::<f32>(1 << 20)?;

    for number in 0..4 {
        // All requests until the guard is dropped belong to one step of kind 0.
        let step = pool.step(0);
        {
            // Reports show the tag of each buffer.
            let _tag = tag("forward");
            let mut kept = Vec::new();
            for layer in 1..=8 {
                // Freed at the end of the iteration; the next layer reuses the memory.
                let _scratch = pool.alloc::<f32>(layer * 10_000)?;
                kept.push(pool.alloc::<f32>(50_000)?);
            }
        }
        println!("step {number}: {}", if step.is_planned() { "planned" } else { "recorded" });
        drop(step);
        // The plan is made on another thread. Waiting for it only serves to make this example deterministic.
        pool.finish_planning();
    }

    let stats = pool.stats();
    let mib = |bytes: u64| bytes / (1 << 20);
    println!("weights: {} elements at {:#x}", weights.len(), weights.address());
    println!("peak live {} MiB, peak mapped {} MiB", mib(stats.live.peak), mib(stats.mapped.peak));
    println!("driver allocations {}, served from the plan {}", stats.chunks.added, stats.plan_hits);
    Ok(())
}
