/* Prints the 24 golden tokens of a golden bundle: the prompt's root, then what each round emitted.

   cc -std=c99 -I../../../kdtr_format golden_tokens.c -o golden_tokens && ./golden_tokens tiny.kdtr
   `make gate` at the top of the repository records build/golden/tiny.kdtr. */
#define KDTR_IMPLEMENTATION
#include "kdtr.h"

int main(int n_arguments, char **arguments)
{
    kdtr_file bundle;
    kdtr_tensor tokens;
    char name[KDTR_NAME_SIZE] = "expect/ar/chunk0/root";
    int points = 0; /* the prompt, and the rounds after it */
    if (n_arguments != 2) return fprintf(stderr, "usage: golden_tokens BUNDLE\n"), 2;
    kdtr_open(&bundle, arguments[1]);
    while (!bundle.status && !kdtr_get(&bundle, name, &tokens) && tokens.dtype == KDTR_I64) {
        for (size_t i = 0; i < kdtr_elements(&tokens); i++)
            printf("%lld\n", (long long)kdtr_load((const char *)tokens.data + 8 * i, 8));
        snprintf(name, sizeof name, "expect/ar/round%d/emitted", points++);
    }
    kdtr_close(&bundle);
    if (fflush(stdout) || ferror(stdout)) return fprintf(stderr, "cannot write the tokens\n"), 1;
    if (points > 1 && bundle.status == KDTR_UNKNOWN) return 0; /* no further round: the end */
    fprintf(stderr, "%s\n", bundle.status ? bundle.error : "the tokens are not i64");
    return 1;
}
