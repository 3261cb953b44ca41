from helpers.sm3_ranks import Check

CHECKS: dict[int, list[Check]] = {2: [], 3: [], 4: []}
