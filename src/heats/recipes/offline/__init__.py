"""Real data and models out of published packages: the recipes' settings that need no model hub.

python -m heats.recipes.offline --help
"""
