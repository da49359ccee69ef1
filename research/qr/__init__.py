"""CAMBench-QR with ImageNet backbones, several trainings each."""
