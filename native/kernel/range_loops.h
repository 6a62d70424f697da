// The minimum and maximum of some elements, one at a time: never -0.0; both NaN if an element is not finite; 0 if there is none.
// Part of a codec's loops.
INLINE void NAME(JOIN(range, ELEMENT))(const char *from, size_t count, REAL *least, REAL *greatest)
{
    REAL mn = count > 0 ? LOAD(from) : 0, mx = mn;
    int is_finite = 1;
    for (size_t i = 0; i < count; i++) {
        const REAL x = LOAD(from + SIZE * i);
        is_finite &= x >= -REAL_MAX && x <= REAL_MAX;
        mn = x < mn ? x : mn;
        mx = x > mx ? x : mx;
    }
    *least = is_finite ? mn + 0 : (REAL)NAN;    // + 0 turns -0.0 into +0.0
    *greatest = is_finite ? mx + 0 : (REAL)NAN;
}
