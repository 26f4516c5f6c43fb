"""REINFORCE++ and REINFORCE++-baseline."""
