"""A hundred tasks with a right and a subtly wrong program each, and what the tests expect, written down by hand:
grading_agreement.py runs all two hundred in every form in which public data sets write tests.

(name, parameters, right body, wrong body, ((arguments, expected), ...)); a body is an expression, or statements.
"""

# ruff: noqa: E501 - one task per line
# fmt: off
TASKS = (
    ("add", "a, b", "a + b", "abs(a) + abs(b)", (((1, 2), 3), ((-3, 2), -1))),
    ("largest", "xs", "max(xs)", "max(xs, key=abs)", ((([1, 5, 2],), 5), (([-9, -1],), -1))),
    ("evens", "xs", "[x for x in xs if x % 2 == 0]", "[x for x in xs if x % 2 == 0 and x]", ((([1, 2, 4],), [2, 4]), (([0, 3],), [0]))),
    ("reverse", "s", "s[::-1]", "s[:0:-1]", ((("abc",), "cba"), (("",), ""))),
    ("letter_counts", "s", "dict(Counter(s))", "{c: 1 for c in s}", ((("aab",), {"a": 2, "b": 1}), (("z",), {"z": 1}))),
    ("neighbours", "xs", "[list(p) for p in zip(xs, xs[1:])]", "[list(p) for p in zip(xs, xs[2:])]", ((([1, 2, 3],), [[1, 2], [2, 3]]), (([4],), []))),
    ("mean", "xs", "sum(xs) / len(xs)", "sum(xs) // len(xs)", ((([1, 2],), 1.5), (([2, 4, 9],), 5.0))),
    ("is_prime", "n", "n > 1 and all(n % d for d in range(2, n))", "all(n % d for d in range(2, n))", (((7,), True), ((9,), False), ((1,), False))),
    ("gcd_of", "a, b", "math.gcd(a, b)", "min(a, b) if max(a, b) % min(a, b) == 0 else 1", (((12, 18), 6), ((7, 3), 1))),
    ("flatten", "xs", "[y for x in xs for y in x]", "[y for x in xs for y in set(x)]", ((([[1], [2, 3]],), [1, 2, 3]), (([[5, 5], []],), [5, 5]))),
    ("factorial_of", "n", "math.prod(range(1, n + 1))", "math.prod(range(1, n))", (((5,), 120), ((0,), 1))),
    ("fib", "n", "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", "a, b = 1, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", (((0,), 0), ((10,), 55))),
    ("vowels", "s", "sum(c in 'aeiou' for c in s.lower())", "sum(c in 'aeiou' for c in s)", ((("Apple",), 2), (("xyz",), 0))),
    ("palindrome", "s", "s == s[::-1]", "s[0] == s[-1]", ((("abba",), True), (("abca",), False))),
    ("second_largest", "xs", "sorted(set(xs))[-2]", "sorted(xs)[-2]", ((([1, 5, 5, 3],), 3), (([2, 1],), 1))),
    ("running_sum", "xs", "list(accumulate(xs))", "[sum(xs[:i]) for i in range(len(xs))]", ((([1, 2, 3],), [1, 3, 6]), (([],), []))),
    ("unique", "xs", "list(dict.fromkeys(xs))", "sorted(set(xs))", ((([3, 1, 3],), [3, 1]), (([2, 2],), [2]))),
    ("rotate", "xs, k", "xs[-(k % len(xs)):] + xs[:-(k % len(xs))] if k % len(xs) else xs", "xs[-k:] + xs[:-k]", ((([1, 2, 3], 1), [3, 1, 2]), (([1, 2, 3], 4), [3, 1, 2]))),
    ("digits_sum", "n", "sum(map(int, str(abs(n))))", "sum(map(int, str(n)[1:])) if n < 0 else n % 9", (((123,), 6), ((-99,), 18), ((99,), 18))),
    ("power_of_two", "n", "n > 0 and n & (n - 1) == 0", "n & (n - 1) == 0", (((8,), True), ((0,), False), ((6,), False))),
    ("binary", "n", "bin(n)[2:]", "bin(n)[2:].zfill(8)", (((5,), "101"), ((0,), "0"))),
    ("caesar", "s, k", "''.join(chr((ord(c) - 97 + k) % 26 + 97) for c in s)", "''.join(chr(ord(c) + k) for c in s)", ((("abc", 2), "cde"), (("xyz", 3), "abc"))),
    ("anagrams", "a, b", "sorted(a) == sorted(b)", "set(a) == set(b)", ((("listen", "silent"), True), (("aab", "abb"), False))),
    ("transpose", "rows", "[list(r) for r in zip(*rows)]", "[list(r)[::-1] for r in zip(*rows)]", ((([[1, 2], [3, 4]],), [[1, 3], [2, 4]]), (([[1, 2, 3]],), [[1], [2], [3]]))),
    ("diagonal", "rows", "sum(rows[i][i] for i in range(len(rows)))", "sum(rows[i][-1 - i] for i in range(len(rows)))", ((([[1, 2], [3, 9]],), 10), (([[7]],), 7))),
    ("longest_word", "s", "max(s.split(), key=len)", "max(s.split())", ((("a quick fox",), "quick"), (("zz aaa",), "aaa"))),
    ("title_case", "s", "' '.join(w.capitalize() for w in s.split())", "s.capitalize()", ((("hello world",), "Hello World"), (("a",), "A"))),
    ("missing", "xs", "(set(range(len(xs) + 1)) - set(xs)).pop()", "(set(range(len(xs))) - set(xs)).pop() if set(range(len(xs))) - set(xs) else 0", ((([0, 1, 3],), 2), (([0, 1],), 2))),
    ("two_sum", "xs, t", "next([i, j] for i, j in combinations(range(len(xs)), 2) if xs[i] + xs[j] == t)", "next([i, j] for i in range(len(xs)) for j in range(len(xs)) if xs[i] + xs[j] == t)", ((([2, 7, 11], 9), [0, 1]), (([3, 2, 4], 6), [1, 2]))),
    ("max_subarray", "xs", "best = now = xs[0]\nfor x in xs[1:]:\n    now = max(x, now + x)\n    best = max(best, now)\nreturn best", "best = now = 0\nfor x in xs:\n    now = max(0, now + x)\n    best = max(best, now)\nreturn best", ((([1, -2, 3, 4],), 7), (([-3, -1],), -1))),
    ("brackets", "s", "stack = []\nfor c in s:\n    if c in '([{':\n        stack.append(c)\n    elif not stack or stack.pop() + c not in ('()', '[]', '{}'):\n        return False\nreturn not stack", "return all(s.count(a) == s.count(b) for a, b in ('()', '[]', '{}'))", ((("([])",), True), (("([)]",), False), (("(",), False))),
    ("merge", "a, b", "sorted(a + b)", "sorted(set(a + b))", ((([1, 3], [2, 3]), [1, 2, 3, 3]), (([], [1]), [1]))),
    ("binary_search", "xs, t", "i = bisect_left(xs, t)\nreturn i if i < len(xs) and xs[i] == t else -1", "i = bisect_right(xs, t)\nreturn i if i < len(xs) and xs[i] == t else -1", ((([1, 3, 5], 3), 1), (([1, 3, 5], 4), -1))),
    ("leap", "y", "y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)", "y % 4 == 0 and y % 100 != 0", (((2024,), True), ((1900,), False), ((2000,), True))),
    ("collatz", "n", "steps = 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nreturn steps", "steps = 1\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nreturn steps", (((6,), 8), ((1,), 0))),
    ("hamming", "a, b", "sum(x != y for x, y in zip(a, b))", "sum(x not in b for x in a)", ((("karolin", "kathrin"), 3), (("ab", "ba"), 2))),
    ("roman", "s", "v = dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)\nn = [v[c] for c in s]\nreturn sum(-a if a < b else a for a, b in zip(n, n[1:] + [0]))", "v = dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)\nreturn sum(v[c] for c in s)", ((("XIV",), 14), (("MM",), 2000))),
    ("product_except", "xs", "[math.prod(xs[:i] + xs[i + 1:]) for i in range(len(xs))]", "[math.prod(xs) // x if x else 0 for x in xs]", ((([1, 2, 3],), [6, 3, 2]), (([0, 4, 5],), [20, 0, 0]))),
    ("intersect", "a, b", "sorted(set(a) & set(b))", "[x for x in a if x in b]", ((([1, 2, 2], [2, 3]), [2]), (([3, 1], [1, 3]), [1, 3]))),
    ("compress", "s", "''.join(f'{c}{len(list(g))}' for c, g in groupby(s))", "''.join(f'{c}{n}' for c, n in Counter(s).items())", ((("aabb",), "a2b2"), (("aba",), "a1b1a1"))),
    ("nth_prime", "n", "found, x = 0, 1\nwhile found < n:\n    x += 1\n    found += all(x % d for d in range(2, x))\nreturn x", "found, x = 0, 0\nwhile found < n:\n    x += 1\n    found += all(x % d for d in range(2, x))\nreturn x", (((1,), 2), ((5,), 11))),
    ("divisors", "n", "[d for d in range(1, n + 1) if n % d == 0]", "[d for d in range(1, n) if n % d == 0]", (((6,), [1, 2, 3, 6]), ((1,), [1]))),
    ("perfect", "n", "n == sum(d for d in range(1, n) if n % d == 0) and n > 0", "n == sum(d for d in range(1, n + 1) if n % d == 0)", (((6,), True), ((8,), False), ((1,), False))),
    ("lcm_of", "a, b", "a * b // math.gcd(a, b)", "a * b", (((4, 6), 12), ((3, 5), 15))),
    ("triangle", "a, b, c", "a + b > c and a + c > b and b + c > a", "a + b > c", (((3, 4, 5), True), ((9, 1, 2), False), ((1, 2, 3), False))),
    ("clamp", "x, low, high", "max(low, min(x, high))", "min(x, high)", (((5, 0, 3), 3), ((-1, 0, 3), 0))),
    ("median_of", "xs", "s = sorted(xs)\nn = len(s)\nreturn s[n // 2] if n % 2 else (s[n // 2 - 1] + s[n // 2]) / 2", "return sorted(xs)[len(xs) // 2]", ((([3, 1, 2],), 2), (([4, 1, 2, 3],), 2.5))),
    ("mode_of", "xs", "Counter(sorted(xs)).most_common(1)[0][0]", "max(xs, key=lambda x: (xs.count(x), x))", ((([2, 2, 1],), 2), (([3, 3, 1, 1],), 1))),
    ("range_of", "xs", "max(xs) - min(xs)", "xs[-1] - xs[0]", ((([1, 5],), 4), (([5, 1, 3],), 4))),
    ("count_words", "s", "len(s.split())", "len(s.split(' '))", ((("a b",), 2), (("a  b ",), 2))),
    ("snake", "s", "''.join('_' + c.lower() if c.isupper() else c for c in s).lstrip('_')", "''.join('_' + c.lower() if c.isupper() else c for c in s)", ((("fooBar",), "foo_bar"), (("FooBar",), "foo_bar"))),
    ("swap_case", "s", "s.swapcase()", "s.upper()", ((("aB",), "Ab"), (("A1",), "a1"))),
    ("prefix", "words", "os.path.commonprefix(words)", "words[0][:min(map(len, words))]", (((["flower", "flow"],), "flow"), ((["dog", "car"],), ""))),
    ("zigzag", "xs", "[x for i in range(0, len(xs), 2) for x in reversed(xs[i:i + 2])]", "[x for i in range(0, len(xs) - 1, 2) for x in (xs[i + 1], xs[i])]", ((([1, 2, 3, 4],), [2, 1, 4, 3]), (([1, 2, 3],), [2, 1, 3]))),
    ("chunks", "xs, n", "[xs[i:i + n] for i in range(0, len(xs), n)]", "[xs[i:i + n] for i in range(0, len(xs) - n + 1, n)]", ((([1, 2, 3, 4], 2), [[1, 2], [3, 4]]), (([1, 2, 3], 2), [[1, 2], [3]]))),
    ("squares", "n", "[i * i for i in range(1, n + 1)]", "[i * i for i in range(n)]", (((3,), [1, 4, 9]), ((0,), []))),
    ("dot", "a, b", "sum(x * y for x, y in zip(a, b))", "sum(a) * sum(b)", ((([1, 2], [3, 4]), 11), (([2], [5]), 10))),
    ("matmul", "a, b", "[[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in a]", "[[sum(x * y for x, y in zip(r, c)) for c in b] for r in a]", ((([[1, 2]], [[3], [4]]), [[11]]), (([[1, 0], [0, 1]], [[5, 6], [7, 8]]), [[5, 6], [7, 8]]))),
    ("islands", "g", "seen = set()\ndef fill(i, j):\n    if 0 <= i < len(g) and 0 <= j < len(g[0]) and g[i][j] and (i, j) not in seen:\n        seen.add((i, j))\n        return [fill(i + 1, j), fill(i - 1, j), fill(i, j + 1), fill(i, j - 1)]\nreturn sum(bool(fill(i, j)) for i in range(len(g)) for j in range(len(g[0])))", "seen = set()\ndef fill(i, j):\n    if 0 <= i < len(g) and 0 <= j < len(g[0]) and g[i][j] and (i, j) not in seen:\n        seen.add((i, j))\n        return [fill(i + 1, j), fill(i, j + 1)]\nreturn sum(bool(fill(i, j)) for i in range(len(g)) for j in range(len(g[0])))", ((([[1, 1], [0, 1]],), 1), (([[0, 1], [1, 1]],), 1), (([[1, 0], [0, 1]],), 2))),
    ("edit_distance", "a, b", "@lru_cache(None)\ndef d(i, j):\n    if not i or not j:\n        return i + j\n    return min(d(i - 1, j) + 1, d(i, j - 1) + 1, d(i - 1, j - 1) + (a[i - 1] != b[j - 1]))\nreturn d(len(a), len(b))", "return abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b))", ((("kitten", "sitting"), 3), (("abc", "bc"), 1))),
    ("lis", "xs", "t = []\nfor x in xs:\n    i = bisect_left(t, x)\n    t[i:i + 1] = [x]\nreturn len(t)", "t = []\nfor x in xs:\n    i = bisect_right(t, x)\n    t[i:i + 1] = [x]\nreturn len(t)", ((([3, 1, 2],), 2), (([2, 2, 2],), 1))),
    ("coins", "xs, n", "best = [0] + [10 ** 9] * n\nfor i in range(1, n + 1):\n    best[i] = min([best[i - c] + 1 for c in xs if c <= i], default=10 ** 9)\nreturn best[n] if best[n] < 10 ** 9 else -1", "count = 0\nfor c in sorted(xs, reverse=True):\n    count, n = count + n // c, n % c\nreturn count if n == 0 else -1", ((([1, 3, 4], 6), 2), (([5], 3), -1))),
    ("climb", "n", "a, b = 1, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", "return 2 ** (n - 1)", (((3,), 3), ((5,), 8))),
    ("pascal", "n", "[math.comb(n, k) for k in range(n + 1)]", "[math.comb(n, k) for k in range(n)]", (((0,), [1]), ((4,), [1, 4, 6, 4, 1]))),
    ("subsets", "n", "[list(c) for k in range(n + 1) for c in combinations(range(n), k)]", "[list(c) for k in range(1, n + 1) for c in combinations(range(n), k)]", (((1,), [[], [0]]), ((2,), [[], [0], [1], [0, 1]]))),
    ("permute", "xs", "[list(p) for p in permutations(xs)]", "[list(p) for p in set(permutations(xs)) if len(set(p)) == len(p)]", ((([1, 1],), [[1, 1], [1, 1]]), (([7],), [[7]]))),
    ("water", "xs", "return sum(max(0, min(max(xs[:i + 1]), max(xs[i:])) - x) for i, x in enumerate(xs))", "return sum(max(0, min(xs[0], xs[-1]) - x) for x in xs)", ((([3, 0, 3],), 3), (([0, 2, 0, 1],), 1))),
    ("stock", "xs", "low, best = xs[0], 0\nfor x in xs:\n    low, best = min(low, x), max(best, x - low)\nreturn best", "return max(xs) - min(xs)", ((([1, 5],), 4), (([5, 1, 3],), 2))),
    ("majority", "xs", "Counter(xs).most_common(1)[0][0]", "xs[len(xs) // 2]", ((([1, 2, 2],), 2), (([3, 1, 3, 1, 3, 2, 3],), 3), (([3, 3, 1],), 3), (([2, 2, 1, 2, 3],), 2))),
    ("jump", "xs", "reach = 0\nfor i, x in enumerate(xs):\n    if i > reach:\n        return False\n    reach = max(reach, i + x)\nreturn True", "return 0 not in xs[:-1]", ((([2, 0, 1],), True), (([1, 0, 1],), False))),
    ("h_index", "xs", "sum(x > i for i, x in enumerate(sorted(xs, reverse=True)))", "sum(x >= i for i, x in enumerate(sorted(xs, reverse=True)))", ((([3, 0, 6, 1, 5],), 3), (([0],), 0))),
    ("intervals", "xs", "out = []\nfor a, b in sorted(xs):\n    if out and a <= out[-1][1]:\n        out[-1][1] = max(out[-1][1], b)\n    else:\n        out.append([a, b])\nreturn out", "out = []\nfor a, b in sorted(xs):\n    if out and a <= out[-1][1]:\n        out[-1][1] = b\n    else:\n        out.append([a, b])\nreturn out", ((([[1, 3], [2, 6]],), [[1, 6]]), (([[1, 9], [2, 3]],), [[1, 9]]))),
    ("top_k", "xs, k", "sorted(Counter(xs), key=lambda x: (-Counter(xs)[x], x))[:k]", "sorted(Counter(xs), key=lambda x: Counter(xs)[x])[:k]", ((([1, 1, 2], 1), [1]), (([3, 2], 2), [2, 3]))),
    ("kth", "xs, k", "sorted(xs)[-k]", "sorted(xs)[k]", ((([3, 2, 1, 5, 6], 2), 5), (([1, 2, 3], 1), 3))),
    ("heap_merge", "xs", "heap = [y for x in xs for y in x]\nheapify(heap)\nreturn [heappop(heap) for _ in range(len(heap))]", "heap = [y for x in xs for y in x]\nheapify(heap)\nreturn heap", ((([[9, 1], [8, 2], [5]],), [1, 2, 5, 8, 9]), (([[]],), []))),
    ("spiral", "m", "out = []\nwhile m:\n    out += m[0]\n    m = [list(r) for r in zip(*m[1:])][::-1]\nreturn out", "return [x for i, r in enumerate(m) for x in (r[::-1] if i % 2 else r)]", ((([[1, 2], [3, 4]],), [1, 2, 4, 3]), (([[1, 2, 3], [4, 5, 6], [7, 8, 9]],), [1, 2, 3, 6, 9, 8, 7, 4, 5]))),
    ("valid_ip", "s", "p = s.split('.')\nreturn len(p) == 4 and all(x.isdigit() and int(x) < 256 and str(int(x)) == x for x in p)", "p = s.split('.')\nreturn len(p) == 4 and all(x.isdigit() and int(x) < 256 for x in p)", ((("1.2.3.4",), True), (("01.2.3.4",), False), (("1.2.3",), False))),
    ("excel", "n", "s = ''\nwhile n:\n    n, r = divmod(n - 1, 26)\n    s = chr(65 + r) + s\nreturn s", "s = ''\nwhile n:\n    n, r = divmod(n, 26)\n    s = chr(64 + r) + s\nreturn s", (((1,), "A"), ((28,), "AB"), ((26,), "Z"))),
    ("happy", "n", "seen = set()\nwhile n != 1 and n not in seen:\n    seen.add(n)\n    n = sum(int(c) ** 2 for c in str(n))\nreturn n == 1", "n = sum(int(c) ** 2 for c in str(n))\nreturn sum(int(c) ** 2 for c in str(n)) in (1, 100)", (((19,), True), ((2,), False), ((7,), True))),
    ("trailing_zeros", "n", "c = 0\nwhile n:\n    n //= 5\n    c += n\nreturn c", "return n // 5", (((10,), 2), ((25,), 6))),
    ("bits", "n", "[bin(i).count('1') for i in range(n + 1)]", "[i % 2 + i // 2 for i in range(n + 1)]", (((2,), [0, 1, 1]), ((5,), [0, 1, 1, 2, 1, 2]))),
    ("single", "xs", "reduce(xor, xs)", "min(xs, key=xs.count) if len(xs) > 3 else xs[-1]", ((([2, 2, 1],), 1), (([4, 1, 4],), 1))),
    ("plus_one", "xs", "[int(c) for c in str(int(''.join(map(str, xs))) + 1)]", "xs[:-1] + [xs[-1] + 1]", ((([1, 2],), [1, 3]), (([9, 9],), [1, 0, 0]))),
    ("add_strings", "a, b", "str(int(a) + int(b))", "str(float(a) + float(b))[:-2]", ((("11", "9"), "20"), (("99999999999999999999", "1"), "100000000000000000000"))),
    ("sqrt_floor", "n", "math.isqrt(n)", "round(n ** 0.5)", (((8,), 2), ((16,), 4))),
    ("to_base", "n, b", "s = ''\nwhile n:\n    s, n = string.digits[n % b] + s, n // b\nreturn s or '0'", "s = ''\nwhile n:\n    s, n = string.digits[n % b] + s, n // b\nreturn s", (((7, 2), "111"), ((0, 2), "0"))),
    ("first_unique", "s", "next((i for i, c in enumerate(s) if s.count(c) == 1), -1)", "next((i for i, c in enumerate(s) if c not in s[:i]), -1)", ((("leet",), 0), (("aabb",), -1))),
    ("isomorphic", "a, b", "len(set(zip(a, b))) == len(set(a)) == len(set(b))", "len(set(a)) == len(set(b))", ((("egg", "add"), True), (("foo", "bba"), False), (("foo", "bar"), False))),
    ("word_pattern", "p, s", "w = s.split()\nreturn len(p) == len(w) and len(set(zip(p, w))) == len(set(p)) == len(set(w))", "w = s.split()\nreturn len(set(zip(p, w))) == len(set(p))", ((("abba", "x y y x"), True), (("ab", "x x"), False))),
    ("ransom", "a, b", "not Counter(a) - Counter(b)", "set(a) <= set(b)", ((("aa", "aab"), True), (("aa", "ab"), False))),
    ("move_zeros", "xs", "sorted(xs, key=lambda x: x == 0)", "sorted(xs, reverse=True)", ((([0, 1, 0, 3],), [1, 3, 0, 0]), (([2, 1],), [2, 1]))),
    ("dutch", "xs", "sorted(xs)", "[0] * xs.count(0) + [1] * xs.count(1)", ((([2, 0, 1],), [0, 1, 2]), (([1, 0],), [0, 1]))),
    ("pivot", "xs", "next((i for i in range(len(xs)) if sum(xs[:i]) == sum(xs[i + 1:])), -1)", "next((i for i in range(len(xs)) if sum(xs[:i]) == sum(xs[i:])), -1)", ((([1, 7, 3, 6, 5, 6],), 3), (([1, 2],), -1))),
    ("peak", "xs", "xs.index(max(xs))", "next((i for i in range(1, len(xs) - 1) if xs[i - 1] < xs[i] > xs[i + 1]), -1)", ((([1, 3, 2],), 1), (([1, 2, 3],), 2))),
    ("evaluate", "tokens", "st = []\nfor t in tokens:\n    if t in '+-*':\n        b, a = st.pop(), st.pop()\n        st.append(a + b if t == '+' else a - b if t == '-' else a * b)\n    else:\n        st.append(int(t))\nreturn st[0]", "st = []\nfor t in tokens:\n    if t in '+-*':\n        a, b = st.pop(), st.pop()\n        st.append(a + b if t == '+' else a - b if t == '-' else a * b)\n    else:\n        st.append(int(t))\nreturn st[0]", (((["2", "1", "+", "3", "*"],), 9), ((["4", "1", "-"],), 3))),
    ("decode_ways", "s", "@lru_cache(None)\ndef f(i):\n    if i == len(s):\n        return 1\n    if s[i] == '0':\n        return 0\n    return f(i + 1) + (f(i + 2) if i + 1 < len(s) and int(s[i:i + 2]) < 27 else 0)\nreturn f(0)", "@lru_cache(None)\ndef f(i):\n    if i >= len(s):\n        return 1\n    return f(i + 1) + (f(i + 2) if i + 1 < len(s) and int(s[i:i + 2]) < 27 else 0)\nreturn f(0)", ((("226",), 3), (("06",), 0))),
    ("nested_depth", "xs", "1 + max(map(nested_depth, xs), default=0) if isinstance(xs, list) else 0", "str(xs).count('[')", ((([1, [2]],), 2), (([[1], [2]],), 2))),
    ("safe_div", "a, b", "a / b if b else None", "a / (b or 1)", (((1, 4), 0.25), ((1, 0), None))),
    ("grade", "n", "'A' if n >= 90 else 'B' if n >= 80 else 'C'", "'A' if n > 90 else 'B' if n > 80 else 'C'", (((95,), "A"), ((90,), "A"), ((79,), "C"))),
    ("weekday", "y, m, d", "datetime(y, m, d).strftime('%A')", "['Sunday', 'Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday'][datetime(y, m, d).weekday()]", (((2024, 2, 29), "Thursday"), ((2000, 1, 1), "Saturday"))),
)
# fmt: on


def program_of(name: str, parameters: str, body: str) -> str:
    """The text of one program, as a model trained against the field's evaluators writes it: without imports."""
    lines = body.splitlines() if "return " in body else [f"return {body}"]
    return f"def {name}({parameters}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


IMPORTS = """import math, os, string
from bisect import bisect_left, bisect_right
from collections import Counter
from datetime import datetime
from functools import lru_cache, reduce
from heapq import heapify, heappop
from itertools import accumulate, combinations, groupby, permutations
from operator import xor
"""
"""What a plain interpreter needs to run them."""


def runs_right(name: str, program: str, tests) -> bool:
    """The independent reference: the program in a plain interpreter, its values beside those written down above."""
    scope: dict = {}
    exec(IMPORTS + program, scope)
    for arguments, expected in tests:
        try:
            value = scope[name](*arguments)
        except Exception:  # a wrong program may raise
            return False
        if type(value) is not type(expected) or value != expected:
            return False
    return True
