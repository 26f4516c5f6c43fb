"""Adapter: OpenRLHF reward_func and AgentInstance files through file:."""
