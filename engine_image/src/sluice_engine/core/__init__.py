"""The pure core: requests, blocks, step times, the scheduler and its loop. No torch, no clock, no I/O."""
