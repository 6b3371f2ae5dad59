"""The runtime: loads a plan, schedules requests, runs steps and serves HTTP, without torch, triton or transformers."""
