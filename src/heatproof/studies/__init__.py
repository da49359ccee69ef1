"""The four protocols end to end, each a short file over the rooms before this one."""
