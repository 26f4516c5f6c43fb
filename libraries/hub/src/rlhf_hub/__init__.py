"""Models and datasets on a hub, and the folders of published models."""
