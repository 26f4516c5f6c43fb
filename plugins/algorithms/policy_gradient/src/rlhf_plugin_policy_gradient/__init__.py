"""Advantage estimators and policy losses that several algorithms name in their config."""
